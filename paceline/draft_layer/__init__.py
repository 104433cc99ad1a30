"""A draft layer: decoder blocks between a token's embedding and a head, fed with the target's features.

`weights.py` describes a layer, whatever its method. `protocol.py` says what a layer takes and gives. `torch_layer.py`
runs the description in torch operators, `paceline.cpu.draft_layer` runs it on the CPU kernels. Methods read checkpoints
into the description; `paceline.methods.backend` chooses what runs it.
"""

from paceline.draft_layer.protocol import (
    MAX_BEST,
    DraftLayer,
    LayerOutput,
    LayerSizes,
    Rows,
    StableRow,
    TreeGrower,
    TreeWanted,
    join_rows,
)
from paceline.draft_layer.weights import Entry, LayerWeights

__all__ = [
    "MAX_BEST",
    "DraftLayer",
    "Entry",
    "LayerOutput",
    "LayerSizes",
    "LayerWeights",
    "Rows",
    "StableRow",
    "TreeGrower",
    "TreeWanted",
    "join_rows",
]
