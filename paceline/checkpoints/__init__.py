"""Public drafter checkpoints: importing them into Paceline's own layout, exporting them, and cutting vocabularies.

Methods name their layouts (`paceline.methods.layouts`). Nothing is unpickled and no code is loaded. Called by
`paceline checkpoints`.
"""

from paceline.checkpoints.exchange import export_checkpoint, import_checkpoint
from paceline.checkpoints.reduce import reduce_checkpoint

__all__ = ["export_checkpoint", "import_checkpoint", "reduce_checkpoint"]
