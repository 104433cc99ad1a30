"""Several multi-token prediction modules in sequence, in torch operators (2412.19437, section 2.2).

Each module reads what the one before it gave one position earlier. A slot's row `p` is that of token `p + 1`, for every
module: module `k` reads there what module `k - 1` gave in row `p - 1`, and the first module the target's state of
position `p`. So all modules run the same rows, and each module's last row is kept between passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.draft_layer import LayerOutput, LayerWeights, Rows, join_rows
from paceline.draft_layer.torch_layer import TorchOutput, TorchStack
from paceline.model.device import Device
from paceline.target.kv.slot import Slot


class ModuleSequence:
    """At least two modules; see :class:`paceline.draft_layer.DraftLayer`.

    The modules run drafted tokens in turn: the second module the first drafted token, and so on. Behind the last module
    the first one continues, on the last one's output.
    """

    def __init__(self, modules: Sequence[LayerWeights], device: Device) -> None:
        weights = modules[0]
        self.hidden, self.dtype, self.where = weights.shape.hidden, weights.dtype, device.torch_device
        self.num_kv_heads, self.head_dim = weights.shape.num_kv_heads, weights.shape.head_dim
        self.values_are_keys = weights.shape.latent is not None
        # The first `index` rows have no state before them that module `index` could read.
        self._modules = [TorchStack(module, device, index, index) for index, module in enumerate(modules)]
        self._carries_norm = weights.carries_norm
        self._head = device.pack(weights.head)
        # What every module but the last gave in the last settled row, `[modules - 1, hidden]`.
        self._carried: WeakKeyDictionary[Slot, Tensor] = WeakKeyDictionary()
        # What each module gave in the drafted rows, `[rows, modules, hidden]`.
        self._drafted: WeakKeyDictionary[Slot, Tensor] = WeakKeyDictionary()

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences; see :class:`paceline.draft_layer.DraftLayer`."""
        state = join_rows([part.states for part in rows])
        is_drafted = [part.depths is not None for part in rows]
        assert all(is_drafted) or not any(is_drafted)
        run = self._run_drafted if is_drafted[0] else self._run_true
        raw, normed = run(state, rows)
        for part in rows:
            part.slot.num_pending += part.num_rows
        selected = normed if len(wanted) == normed.shape[0] else normed[list(wanted)]
        return TorchOutput(normed if self._carries_norm else raw, self._head(selected).float())

    def _run_true(self, state: Tensor, rows: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """Rows of true features, through all modules; the first one's output, raw and normed."""
        counts = [part.num_rows for part in rows]
        before = [self._before(part.slot) for part in rows]
        lasts = []
        first: tuple[Tensor, Tensor] | None = None
        for index, module in enumerate(self._modules):
            raw = module.forward(rows, state)
            normed = module.norm(raw)
            first = first or (raw, normed)
            if index + 1 < len(self._modules):
                given = (normed if self._carries_norm else raw).split(counts)
                lasts.append([part[-1] for part in given])
                shifted = (
                    torch.cat((b[index : index + 1], part[:-1]))
                    for b, part in zip(before, given, strict=True)
                )
                state = torch.cat(list(shifted))
        for place, part in enumerate(rows):
            self._carried[part.slot] = torch.stack([last[place] for last in lasts])
        assert first is not None
        return first

    def _before(self, slot: Slot) -> Tensor:
        """What the modules gave in the row before a slot's next one, `[modules - 1, hidden]`."""
        if slot.length:
            return self._carried[slot]
        return torch.zeros(len(self._modules) - 1, self.hidden, dtype=self.dtype, device=self.where)

    def _run_drafted(self, state: Tensor, rows: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """Drafted rows; of each, what the module whose turn it is gave, raw and normed.

        A drafted token is also one more row of the modules that come after in turn: they read what the one before them
        gave for the token before.
        """
        count = len(self._modules)
        depths = [depth for part in rows for depth in part.depths or ()]
        modules_of_rows = torch.tensor([depth % count for depth in depths], device=self.where)
        paths = [_paths(part) for part in rows]
        parents = torch.cat([self._parents(part, own) for part, own in zip(rows, paths, strict=True)])
        raw, normed = torch.empty_like(state), torch.empty_like(state)
        given = torch.zeros(len(depths), count, self.hidden, dtype=self.dtype, device=self.where)
        # Rows lie side by side in a slot whatever modules they are for, so each module runs all of them.
        for index in range(count):
            if not any(_runs(index, depth, count) for depth in depths):
                continue
            own = [
                replace(part, paths=[_seen(path, index, count) for path in of_part])
                for part, of_part in zip(rows, paths, strict=True)
            ]
            is_here = (modules_of_rows == index)[:, None]
            read = torch.where(is_here, state, parents[:, index - 1]) if index else state
            output = self._modules[index].forward(own, read)
            output_normed = self._modules[index].norm(output)
            raw, normed = torch.where(is_here, output, raw), torch.where(is_here, output_normed, normed)
            given[:, index] = output_normed if self._carries_norm else output
        for part, own_given in zip(rows, given.split([part.num_rows for part in rows]), strict=True):
            earlier = self._drafted.get(part.slot)
            kept = own_given[:0] if earlier is None else earlier[: part.slot.num_pending]
            self._drafted[part.slot] = torch.cat((kept, own_given))
        return raw, normed

    def _parents(self, part: Rows, paths: Sequence[Sequence[int]]) -> Tensor:
        """What every module but the last gave in the row before each, `[rows, modules - 1, hidden]`."""
        return torch.stack(
            [
                self._drafted[part.slot][path[-2], :-1] if len(path) > 1 else self._carried[part.slot]
                for path in paths
            ]
        )


def _paths(part: Rows) -> list[list[int]]:
    """Of each drafted row, the rows behind the settled ones that lead to it, its own last."""
    assert part.depths is not None
    return part.paths or [list(range(depth)) for depth in part.depths]


def _runs(index: int, depth: int, count: int) -> bool:
    """Whether a module runs the drafted row of a depth: from its first turn back, and then at every turn."""
    return depth <= index or depth % count == index


def _seen(path: Sequence[int], index: int, count: int) -> list[int]:
    """Of the rows that lead to a drafted one, those that a module ran, and the row itself."""
    return [
        row for depth, row in enumerate(path, start=1) if _runs(index, depth, count) or depth == len(path)
    ]
