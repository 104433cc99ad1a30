"""A draft layer that is run again on its own outputs over whole texts, differentiable and several steps deep.

Responsible for who sees whom in later steps (training-time test: Li et al., 2503.01840, section 3.2). What attention
reads differs from method to method and comes from the objective. Pure; called by the objectives of drafters that read
their own layer's output.

Row ``r`` of step 0 joins the target's features at position ``r`` with token ``r + 1`` and predicts token ``r + 2``.
Step ``j`` takes the layer's own output at row ``r`` instead of features, with token ``r + 1 + j``: the same input that
the drafter has ``j`` tokens after its last true feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.rope import rotation_at
from paceline.training.attention import OwnKeys, Pattern, attend_by_key_head, by_key_head
from paceline.training.block import DifferentiableBlock

Enter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(tokens [texts, length], state [texts, length, hidden])`` to what attention reads, and the residual."""


class UnrolledBlock:
    """A decoder block over whole texts that is run again.

    In the first step each row sees the rows up to itself. In a later step each row sees what its row of the first step
    saw, and its own row of every step since.

    Args:
        block: the block.
        rope_theta: base of its rotary frequencies.
        length: of the texts.
        dtype: to compute in.
    """

    def __init__(
        self, block: DifferentiableBlock, rope_theta: float, length: int, dtype: torch.dtype
    ) -> None:
        self._block, self._rope_theta, self._length = block, rope_theta, length
        self._causal = Pattern.causal(length, dtype).bias
        self._first: tuple[Tensor, Tensor] | None = None
        self._later: list[OwnKeys] = []

    def step(self, read: Tensor, residual: Tensor, offset: int) -> Tensor:
        """The block's output ``[texts, length, hidden]``.

        Args:
            read: what attention reads, ``[texts, length, read_width]``.
            residual: what its result is added to, ``[texts, length, hidden]``.
            offset: positions from the rows of the first step to those of this step.
        """
        width = self._block.shape.rope_dim
        rotation = rotation_at(self._rope_theta, width, offset, self._length, read.dtype)
        return self._block.forward(read, residual, rotation, self._attend)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = by_key_head(k), by_key_head(v)
        if self._first is None:
            self._first = keys, values
        else:
            self._later = [*self._later, OwnKeys(0, keys, values)]
        return attend_by_key_head(q, *self._first, self._causal, self._later)


def unroll(block: UnrolledBlock, tokens: Tensor, state: Tensor, enter: Enter, steps: int) -> Iterator[Tensor]:
    """Yields the block's output ``[texts, length, hidden]`` of each step.

    Args:
        block: a block that has not been run yet.
        tokens: ``[texts, length]`` int64, right-padded; causal attention needs no mask for the padding.
        state: ``[texts, length, hidden]``, features.
        enter: see :data:`Enter`.
        steps: how many.
    """
    ids = tokens
    for j in range(steps):
        ids = F.pad(ids[:, 1:], (0, 1))
        state = block.step(*enter(ids, state), j)
        yield state
