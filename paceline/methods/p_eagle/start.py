"""Where P-EAGLE training starts: EAGLE-3's linear start in the fused layer, quiet layers above it, a typical mask.

Called by the method's `recipe.py`. Knows nothing of the loss.
"""

from __future__ import annotations

from torch import Tensor

from paceline.methods.eagle.fused_start import Eagle3Start, starting_parameters
from paceline.methods.p_eagle.objective import PEagleShape
from paceline.training.start import random_parameters


def p_eagle_start(
    shape: PEagleShape, start: Eagle3Start, taps: Tensor, target_head: Tensor, embedding: Tensor, seed: int
) -> dict[str, Tensor]:
    """Parameters that begin as the fitted linear drafter at depth 0, with an average position at the others.

    Args:
        shape: sizes; ``hidden`` must equal ``target_hidden``.
        start: from :func:`paceline.methods.eagle.fused_start.fit_linear`.
        taps: mean taps ``[taps_width]``: what ``mask_hidden`` begins as.
        target_head: the target's head rows of the draft vocabulary.
        embedding: the target's ``[vocab, hidden]``.
        seed: of the random matrices.
    """
    fused = starting_parameters(shape, start, target_head, seed)
    above = {name: size for name, size in shape.parameter_shapes().items() if name.startswith("layers.")}
    parameters = fused | random_parameters(above, seed + 1, branch_scale=0.1)
    parameters["embed_tokens.weight"] = embedding.float()
    parameters["mask_hidden"] = (taps / start.tap_scale)[None, None]
    return parameters
