"""Public drafter checkpoints: reading them into Paceline's own layout, and writing them back.

One module per format, each with two functions of the same signature (see `formats.py`); nothing is unpickled and no
code is loaded. Called by `paceline checkpoints`.
"""

from paceline.checkpoints.exchange import export_checkpoint, import_checkpoint
from paceline.checkpoints.formats import FORMATS, Format
from paceline.checkpoints.target_facts import TargetFacts

__all__ = ["FORMATS", "Format", "TargetFacts", "export_checkpoint", "import_checkpoint"]
