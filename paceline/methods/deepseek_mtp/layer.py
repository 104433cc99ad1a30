"""DeepSeek-V3's multi-token prediction modules (2412.19437, section 2.2): their tensors, and their passes in torch.

A module norms a token's embedding and the hidden state before it, each on its own, joins them (`eh_proj`, embedding
first), and runs one decoder block; a norm of its own and the target's head give the token after next. Several modules
stand in sequence, each reading what the one before it gave one position earlier. Knows nothing of chains, trees or
commits; called by `paceline.methods.deepseek_mtp.drafter`. One module on the CPU kernels: `deepseek_mtp_native.py`.

A slot's row `p` is that of token `p + 1`, for every module: module `k` reads there what module `k - 1` gave in row
`p - 1`, and the first module the target's state of position `p`. So all modules run the same rows, and what is kept
between passes is each module's last row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.decoder_block import BlockWeights, DecoderBlock, block_shapes
from paceline.methods.draft_layer import LayerOutput, Rows, TorchOutput, join_rows
from paceline.methods.target_vocabulary import SharedVocabulary, map_shapes
from paceline.model.device import RmsNorm
from paceline.target import Device
from paceline.target.kv_cache import Slot


def num_modules(config: DrafterConfig) -> int:
    """Modules of a checkpoint; one where nothing is said, as in all that were published with weights."""
    return config.size("num_modules") if "num_modules" in config.shape else 1


def module_prefix(index: int) -> str:
    """What the tensors' names of a module begin with; 0 for the first."""
    return f"layers.{index}."


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint: public names, counted from the first module (docs/methods/deepseek_mtp.md), and the map
    of a part of the vocabulary.
    """
    d = config.size("hidden")
    shapes = map_shapes(config)
    for index in range(num_modules(config)):
        prefix = module_prefix(index)
        shapes |= {
            prefix + "enorm.weight": (d,),
            prefix + "hnorm.weight": (d,),
            prefix + "eh_proj.weight": (d, 2 * d),
            prefix + "input_layernorm.weight": (d,),
            **block_shapes(config, prefix, d),
            prefix + "shared_head.norm.weight": (d,),
        }
    return shapes


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """A module, not yet packed.

    Attributes:
        embedding_norm: `[hidden]`, of embeddings.
        hidden_norm: `[hidden]`, of hidden states.
        join: `[hidden, 2 * hidden]`, for `[embedding ; hidden state]`.
        input_norm: `[hidden]`, of what attention reads.
        block: attention and gated product.
        head_norm: `[hidden]`, before the target's head.
    """

    embedding_norm: Tensor
    hidden_norm: Tensor
    join: Tensor
    input_norm: Tensor
    block: BlockWeights
    head_norm: Tensor


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """All modules and what they share.

    Attributes:
        modules: in sequence, at least one.
        embedding: the target's, `[vocab, hidden]`.
        head: the target's, of the tokens that are proposed: `[draft_vocab, hidden]`.
        carries_norm: whether what a module hands on is normed by its `head_norm`, as GLM does, or the block's raw
            output, as DeepSeek does.
    """

    modules: tuple[ModuleWeights, ...]
    embedding: Tensor
    head: Tensor
    carries_norm: bool

    @classmethod
    def read(
        cls,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        vocabulary: SharedVocabulary,
        dtype: torch.dtype,
    ) -> MtpWeights:
        """Take sizes from the checkpoint's config."""
        modules = []
        for index in range(num_modules(config)):
            prefix = module_prefix(index)
            block = BlockWeights.read(config, tensors, prefix, dtype, vocabulary.embedding.device)
            names = ("enorm", "hnorm", "eh_proj", "input_layernorm", "shared_head.norm")
            own = [tensors[f"{prefix}{name}.weight"].to(dtype) for name in names]
            modules.append(ModuleWeights(own[0], own[1], own[2], own[3], block, own[4]))
        return cls(tuple(modules), vocabulary.embedding, vocabulary.head, config.flag("carries_norm"))


class MtpModule:
    """A module in torch operators, with products packed for the device.

    Args:
        weights: of the module.
        device: where it runs.
        index: its place, 0 for the first: its layer of the cache slots.
    """

    def __init__(self, weights: ModuleWeights, device: Device, index: int) -> None:
        where, eps = device.torch_device, weights.block.eps
        self._embedding_norm = RmsNorm(weights.embedding_norm.to(where), eps)
        self._hidden_norm = RmsNorm(weights.hidden_norm.to(where), eps)
        self._join = device.pack(weights.join)
        self._input_norm = RmsNorm(weights.input_norm.to(where), eps)
        # The first `index` rows have no state before them that the module could read.
        self._block = DecoderBlock(weights.block, device, index, is_last=False, first_row=index)
        self.head_norm = RmsNorm(weights.head_norm.to(where), eps)

    def forward(self, embedded: Tensor, state: Tensor, rows: Sequence[Rows]) -> Tensor:
        """The block's output `[n, hidden]` from embeddings and hidden states `[n, hidden]`."""
        joined = torch.cat((self._embedding_norm(embedded), self._hidden_norm(state)), dim=-1)
        entered = self._join(joined)
        return self._block.forward(self._input_norm(entered), entered, rows)


class DeepseekMtpLayer:
    """All modules in torch operators; see :class:`paceline.methods.draft_layer.DraftLayer`.

    Drafted tokens are run by the modules in turn: the first drafted token by the second module, and behind the last
    module by the first again, on the last one's output. A single module goes on from its own.
    """

    def __init__(self, weights: MtpWeights, device: Device) -> None:
        block = weights.modules[0].block
        self.hidden, self.dtype = block.hidden, block.dtype
        self.num_kv_heads, self.head_dim = block.num_kv_heads, block.head_dim
        self.where = device.torch_device
        self._embedding = weights.embedding
        self._modules = [MtpModule(module, device, index) for index, module in enumerate(weights.modules)]
        self._carries_norm = weights.carries_norm
        self._head = device.pack(weights.head)
        # What every module but the last gave in the last settled row, `[modules - 1, hidden]`.
        self._carried: WeakKeyDictionary[Slot, Tensor] = WeakKeyDictionary()
        # What each module gave in the drafted rows, `[rows, modules, hidden]`.
        self._drafted: WeakKeyDictionary[Slot, Tensor] = WeakKeyDictionary()

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences; see :class:`paceline.methods.draft_layer.DraftLayer`."""
        tokens = torch.tensor([token for part in rows for token in part.tokens], device=self.where)
        embedded, state = F.embedding(tokens, self._embedding), join_rows([part.states for part in rows])
        is_drafted = [part.depths is not None for part in rows]
        assert all(is_drafted) or not any(is_drafted)
        run = self._run_drafted if is_drafted[0] else self._run_true
        raw, normed = run(embedded, state, rows)
        for part in rows:
            part.slot.num_pending += part.num_rows
        asked = normed if len(wanted) == normed.shape[0] else normed[list(wanted)]
        return TorchOutput(normed if self._carries_norm else raw, self._head(asked).float())

    def _run_true(self, embedded: Tensor, state: Tensor, rows: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """Rows of true features, through all modules; the first one's output, raw and normed."""
        counts = [part.num_rows for part in rows]
        before = [self._before(part.slot) for part in rows]
        lasts = []
        first: tuple[Tensor, Tensor] | None = None
        for index, module in enumerate(self._modules):
            raw = module.forward(embedded, state, rows)
            normed = module.head_norm(raw)
            first = first or (raw, normed)
            if index + 1 < len(self._modules):
                given = (normed if self._carries_norm else raw).split(counts)
                lasts.append([part[-1] for part in given])
                shifted = (
                    torch.cat((b[index : index + 1], part[:-1]))
                    for b, part in zip(before, given, strict=True)
                )
                state = torch.cat(list(shifted))
        for place, part in enumerate(rows if lasts else ()):
            self._carried[part.slot] = torch.stack([last[place] for last in lasts])
        assert first is not None
        return first

    def _before(self, slot: Slot) -> Tensor:
        """What the modules gave in the row before a slot's next one, `[modules - 1, hidden]`."""
        if slot.length and len(self._modules) > 1:
            return self._carried[slot]
        return torch.zeros(len(self._modules) - 1, self.hidden, dtype=self.dtype, device=self.where)

    def _run_drafted(self, embedded: Tensor, state: Tensor, rows: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """Drafted rows; of each, what the module whose turn it is gave, raw and normed.

        A drafted token is also one more row of the modules that come after in turn: they read what the one before them
        gave for the token before.
        """
        count = len(self._modules)
        if count == 1:
            raw = self._modules[0].forward(embedded, state, rows)
            return raw, self._modules[0].head_norm(raw)
        depths = [depth for part in rows for depth in part.depths or ()]
        turns = torch.tensor([depth % count for depth in depths], device=self.where)
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
            is_turn = (turns == index)[:, None]
            read = torch.where(is_turn, state, parents[:, index - 1]) if index else state
            output = self._modules[index].forward(embedded, read, own)
            output_normed = self._modules[index].head_norm(output)
            raw, normed = torch.where(is_turn, output, raw), torch.where(is_turn, output_normed, normed)
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
