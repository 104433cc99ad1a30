"""Public drafter checkpoints: reading them into Paceline's own layout, writing them back, and cutting vocabularies.

One module per format, each with two functions of the same signature (see `formats.py`); nothing is unpickled and no
code is loaded. Called by `paceline checkpoints`.
"""

from paceline.checkpoints.exchange import export_checkpoint, import_checkpoint
from paceline.checkpoints.formats import FORMATS, Format
from paceline.checkpoints.reduce import Reduction, reduce_checkpoint
from paceline.checkpoints.target_facts import TargetFacts

__all__ = [
    "FORMATS",
    "Format",
    "Reduction",
    "TargetFacts",
    "export_checkpoint",
    "import_checkpoint",
    "reduce_checkpoint",
]
