"""EAGLE-3 (Li et al., 2503.01840): one decoder layer over the target's fused features, drafting chains or trees.

Row `r` of a sequence joins the target's fused feature of position `r` with token `r + 1` and proposes token `r + 2`.
Rows made of true features are *stable* and stay in the drafter's cache; rows that continue from the layer's own output
are *drafted* and fall away once true features for their positions arrive. `fc` runs on the target's side (the tap's
projection), so features come in at the drafter's width.

The layer is run through the target's own parts: packed linear products, key-value slots, rotary tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafters.base import DrafterError, DraftRequest, UnknownDraftSequenceError
from paceline.drafters.checkpoint import CheckpointError, DrafterConfig, load_tensor, load_tensors
from paceline.drafters.choice import choose_chain_tokens
from paceline.drafters.tree import GrowingTree
from paceline.target import Device, TapSpec
from paceline.target.kv_cache import KVCache, KVLayout, Slot
from paceline.target.rope import RopeTable
from paceline.target.weights import SafetensorsDir
from paceline.trie import DraftEntry

MAX_WIDTH = 8
"""Most nodes that a tree expands at one depth."""


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint by their public names (see docs/methods/eagle3.md)."""
    d, target = config.size("hidden"), config.size("target_hidden")
    head_dim, intermediate = config.size("head_dim"), config.size("intermediate")
    q, kv = config.size("num_heads") * head_dim, config.size("num_kv_heads") * head_dim
    vocab, draft_vocab = config.size("target_vocab"), config.size("draft_vocab")
    return {
        "fc.weight": (d, len(_tap_layers(config)) * target),
        "midlayer.input_layernorm.weight": (target,),
        "midlayer.hidden_norm.weight": (d,),
        "midlayer.post_attention_layernorm.weight": (d,),
        "midlayer.self_attn.q_proj.weight": (q, target + d),
        "midlayer.self_attn.k_proj.weight": (kv, target + d),
        "midlayer.self_attn.v_proj.weight": (kv, target + d),
        "midlayer.self_attn.o_proj.weight": (d, q),
        "midlayer.mlp.gate_proj.weight": (intermediate, d),
        "midlayer.mlp.up_proj.weight": (intermediate, d),
        "midlayer.mlp.down_proj.weight": (d, intermediate),
        "norm.weight": (d,),
        "lm_head.weight": (draft_vocab, d),
        "d2t": (draft_vocab,),
        "t2d": (vocab,),
    }


def _tap_layers(config: DrafterConfig) -> tuple[int, ...]:
    layers = config.shape.get("tap_layers")
    if not isinstance(layers, list) or not layers or not all(isinstance(i, int) and i >= 0 for i in layers):
        raise CheckpointError("shape.tap_layers must list the target layers whose incoming streams are read")
    return tuple(layers)


class Eagle3Layer:
    """The draft layer's weights and its forward pass over rows of several sequences."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        embedding: Tensor,
        device: Device,
        dtype: torch.dtype,
    ) -> None:
        self.hidden = config.size("hidden")
        self.target_hidden = config.size("target_hidden")
        self.num_heads, self.num_kv_heads = config.size("num_heads"), config.size("num_kv_heads")
        self.head_dim = config.size("head_dim")
        self.group = self.num_heads // self.num_kv_heads
        self.where, self.dtype = device.torch_device, dtype
        self.eps = float(config.shape.get("rms_eps", 1e-5))
        rope = SimpleNamespace(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": float(config.shape.get("rope_theta", 10000.0)),
            }
        )
        self.rope = RopeTable(rope, None, self.head_dim, dtype, self.where)
        self.scale = self.head_dim**-0.5
        self.embedding = embedding  # [target_vocab, target_hidden]

        def weight(name: str) -> Tensor:
            return tensors[name].to(dtype)

        attention = [weight(f"midlayer.self_attn.{x}_proj.weight") for x in "qkv"]
        gate_up = [weight(f"midlayer.mlp.{x}_proj.weight") for x in ("gate", "up")]
        self.qkv = device.pack(torch.cat(attention))
        self.out = device.pack(weight("midlayer.self_attn.o_proj.weight"))
        self.gate_up = device.pack(torch.cat(gate_up))
        self.down = device.pack(weight("midlayer.mlp.down_proj.weight"))
        self.head = device.pack(weight("lm_head.weight"))
        norms = (
            "midlayer.input_layernorm",
            "midlayer.hidden_norm",
            "midlayer.post_attention_layernorm",
            "norm",
        )
        self.embed_norm, self.state_norm, self.mlp_norm, self.final_norm = (
            weight(f"{name}.weight").to(self.where) for name in norms
        )

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(rows, (rows.shape[-1],), weight, self.eps)

    def forward(self, rows: Sequence[Rows], max_position: int) -> Tensor:
        """Run rows of several sequences, writing their keys and values behind each slot's rows.

        Args:
            rows: one sequence's rows each.
            max_position: no position is above it.

        Returns:
            The layer's output before the final norm, `[n, hidden]`, sequences in order.
        """
        tokens = _join([part.tokens for part in rows])
        state = _join([part.states for part in rows])  # [n, hidden]
        cos, sin = self.rope.gather(_join([part.positions for part in rows]), max_position)
        embedded = self._norm(F.embedding(tokens, self.embedding), self.embed_norm)
        joined = torch.cat(
            (embedded, self._norm(state, self.state_norm)), dim=-1
        )  # [n, target_hidden + hidden]
        heads = self.qkv(joined).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        rotary = heads.narrow(1, 0, self.num_heads + self.num_kv_heads)
        swapped = rotary.roll(self.head_dim // 2, -1)
        rotary.mul_(cos).addcmul_(swapped, sin)
        mixed, first = [], 0
        for part in rows:
            end = first + part.num_rows
            mixed.append(self._attend(heads[first:end], part))
            first = end
        state = self.out.add(_join(mixed), state)
        gate, up = self.gate_up(self._norm(state, self.mlp_norm)).chunk(2, dim=-1)
        return self.down.add(F.silu(gate).mul_(up), state)

    def _attend(self, heads: Tensor, part: Rows) -> Tensor:
        """One sequence's attention over its slot: `[n, num_heads * head_dim]`."""
        n, slot = heads.shape[0], part.slot
        used = slot.length + slot.num_pending
        slot.append(0, used, heads.narrow(1, self.num_heads, 2 * self.num_kv_heads))
        slot.num_pending += n
        keys, values = slot.view(0, 0, used + n)
        # Query heads that share a key head become rows of it, so that keys are read once.
        queries = heads.narrow(1, 0, self.num_heads).reshape(n, self.num_kv_heads, self.group, self.head_dim)
        queries = queries.transpose(0, 1).reshape(1, self.num_kv_heads, n * self.group, self.head_dim)
        mask = part.mask
        if mask is None and n > 1:
            mask = torch.full((n, used + n), -torch.inf, dtype=self.dtype, device=self.where).triu(used + 1)
        if mask is not None:
            mask = mask.repeat_interleave(self.group, dim=0)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scale)
        return out.view(self.num_kv_heads, n, -1).transpose(0, 1).reshape(n, -1)

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits of layer outputs: `[n, hidden] -> [n, draft_vocab]` float32."""
        return self.head(self._norm(states, self.final_norm)).float()


@dataclass(slots=True)
class Rows:
    """One sequence's rows in a forward pass.

    Attributes:
        tokens: `[n]` int64 target ids.
        states: `[n, hidden]`: fused features, or the layer's own outputs.
        positions: `[n]` int64 rotary positions.
        mask: `[n, rows in the slot + n]` additive; None for a causal chain.
    """

    slot: Slot
    tokens: Tensor
    states: Tensor
    positions: Tensor
    mask: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of this sequence."""
        return int(self.states.shape[0])


@dataclass(slots=True)
class Chain:
    """A drafted chain that may be continued.

    Attributes:
        start: committed length it goes on from.
        tokens: drafted so far.
        log_probs: of each token.
        state: layer output behind the last token, `[1, hidden]`.
    """

    start: int
    state: Tensor
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class SequenceState:
    """What the drafter knows of a sequence: its tokens, features not yet run, and its slot."""

    tokens: list[int]
    slot: Slot
    slot_id: int
    pending: list[Tensor] = field(default_factory=list)  # features behind the stable rows, each [n, hidden]
    num_features: int = 0
    last_state: Tensor | None = None  # output of the last stable row, [1, hidden]
    chain: Chain | None = None

    @property
    def is_ready(self) -> bool:
        """True once features for all positions but the root's are in."""
        return self.num_features >= len(self.tokens) - 1 and len(self.tokens) > 1


class Eagle3Drafter:
    """Drafts with an EAGLE-3 layer; see `paceline.drafters.base.Drafter`."""

    method: ClassVar[str] = "eagle3"

    def __init__(
        self, layer: Eagle3Layer, draft_ids: Tensor, tap: TapSpec, max_positions: int, device: Device
    ) -> None:
        self._layer = layer
        self._draft_ids = draft_ids  # [draft_vocab] int64: target id of each draft id
        self.tap: TapSpec | None = tap
        self.max_positions = max_positions
        layout = KVLayout(1, layer.num_kv_heads, layer.head_dim, layer.dtype, device.torch_device)
        self._cache = KVCache(layout)
        self._sequences: dict[int, SequenceState] = {}

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """The tap of a checkpoint: its layers, fused by `fc` on the target's side."""
        return TapSpec(layers=_tap_layers(config), projection=load_tensor(directory, "fc.weight"))

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Eagle3Drafter:
        """Load a checkpoint; the embedding is the target's own."""
        with torch.inference_mode():
            tensors = load_tensors(directory, parameter_shapes(config))
            with SafetensorsDir(target_dir) as weights:
                embedding = weights.get("model.embed_tokens.weight", dtype).to(device.torch_device)
            vocab, width = config.size("target_vocab"), config.size("target_hidden")
            if tuple(embedding.shape) != (vocab, width):
                raise CheckpointError(
                    f"the target's embedding is {tuple(embedding.shape)}, not {(vocab, width)}"
                )
            offsets = tensors["d2t"].to(torch.int64)  # target id - draft id
            draft_ids = offsets + torch.arange(offsets.shape[0])
            if (
                int(draft_ids.min()) < 0
                or int(draft_ids.max()) >= vocab
                or len(draft_ids.unique()) < len(draft_ids)
            ):
                raise CheckpointError("d2t does not map draft ids to distinct target ids")
            layer = Eagle3Layer(config, tensors, embedding, device, dtype)
            tap = TapSpec(layers=_tap_layers(config), projection=tensors["fc.weight"])
            return cls(layer, draft_ids.to(device.torch_device), tap, config.size("max_positions"), device)

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Start following a sequence."""
        self.close(sequence_id)
        slot_id = self._cache.open(len(tokens) + 64)
        self._sequences[sequence_id] = SequenceState(list(tokens), self._cache.get(slot_id), slot_id)

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""
        state = self._sequences.pop(sequence_id, None)
        if state is not None:
            self._cache.close(state.slot_id)

    def extend(self, sequence_id: int, start: int, tokens: Sequence[int]) -> None:
        """Take in committed tokens."""
        state = self._get(sequence_id)
        known = len(state.tokens)
        if start > known:
            raise DrafterError(f"sequence {sequence_id}: tokens {known} to {start - 1} are missing")
        state.tokens.extend(tokens[known - start :])

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        """Take in fused features."""
        state = self._get(sequence_id)
        skip = state.num_features - start
        if skip < 0:
            raise DrafterError(
                f"sequence {sequence_id}: features from {state.num_features} to {start - 1} are missing"
            )
        if features.ndim != 2 or features.shape[1] != self._layer.hidden:
            raise DrafterError(f"features must be [n, {self._layer.hidden}], not {list(features.shape)}")
        if skip >= features.shape[0]:
            return
        fresh = features[skip:].to(device=self._layer.where, dtype=self._layer.dtype)
        state.pending.append(fresh)
        state.num_features += int(fresh.shape[0])

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """Draft chains, and trees for requests with more nodes than tokens, all sequences together."""
        with torch.inference_mode():
            able = [r for r in requests if self._can_draft(r)]
            self._run_stable_rows([self._sequences[r.sequence_id] for r in able])
            chains = [r for r in able if r.max_nodes <= r.num_tokens or not r.sampling.is_greedy]
            self._grow_chains(chains)
            entries: dict[int, DraftEntry] = {}
            for request in able:
                state = self._sequences[request.sequence_id]
                if request in chains:
                    chain = state.chain
                    assert chain is not None
                    entries[request.sequence_id] = DraftEntry.chain(
                        chain.start, tuple(chain.tokens), tuple(chain.log_probs)
                    )
                else:
                    entries[request.sequence_id] = self._grow_tree(state, request)
        return [entries.get(request.sequence_id) for request in requests]

    def _get(self, sequence_id: int) -> SequenceState:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise UnknownDraftSequenceError(f"sequence {sequence_id} is not open") from None

    def _can_draft(self, request: DraftRequest) -> bool:
        state = self._get(request.sequence_id)
        return (
            request.num_tokens > 0
            and state.is_ready
            and len(state.tokens) + request.num_tokens <= self.max_positions
        )

    def _reserve(self, states: Sequence[SequenceState], num_rows: Sequence[int]) -> None:
        self._cache.reserve([(state.slot_id, count) for state, count in zip(states, num_rows, strict=True)])

    def _run_stable_rows(self, states: Sequence[SequenceState]) -> None:
        """Run what true features have come in since, dropping drafted rows; one pass over all sequences."""
        behind = [state for state in states if state.pending and state.slot.length < len(state.tokens) - 1]
        if not behind:
            return
        rows, most = [], 0
        for state in behind:
            state.slot.num_pending = 0  # drafted rows fall away
            state.chain = None
            features, first = _join(state.pending), state.slot.length
            count = min(int(features.shape[0]), len(state.tokens) - 1 - first)
            state.pending = [features[count:]] if count < features.shape[0] else []
            tokens = torch.tensor(state.tokens[first + 1 : first + 1 + count], device=self._layer.where)
            positions = torch.arange(first, first + count, device=self._layer.where)
            rows.append(Rows(state.slot, tokens, features[:count], positions))
            most = max(most, first + count - 1)
        self._reserve(behind, [part.num_rows for part in rows])
        out, first = self._layer.forward(rows, most), 0
        for state, part in zip(behind, rows, strict=True):
            first += part.num_rows
            state.last_state = out[first - 1 : first]
            state.slot.length += part.num_rows
            state.slot.num_pending = 0

    def _grow_chains(self, requests: Sequence[DraftRequest]) -> None:
        """Extend each request's chain to its length, one token of all sequences at a time."""
        growing = []
        for request in requests:
            state = self._sequences[request.sequence_id]
            if state.chain is None or state.chain.start != len(state.tokens):
                assert state.last_state is not None
                state.slot.num_pending = 0
                state.chain = Chain(len(state.tokens), state.last_state)
            if len(state.chain.tokens) < request.num_tokens:
                growing.append((request, state))
        if not growing:
            return
        self._reserve([s for _, s in growing], [r.num_tokens for r, _ in growing])
        last = torch.tensor([_last_token(state) for _, state in growing], device=self._layer.where)
        while growing:
            chains = [state.chain for _, state in growing if state.chain is not None]
            fresh = [chain for chain in chains if not chain.tokens]
            states = _join([chain.state for chain in chains])
            if len(fresh) != len(chains):
                states = self._run_drafted(growing, states, last)
            logits = self._layer.logits(states)  # [sequences, draft_vocab]
            positions = [chain.start + len(chain.tokens) for chain in chains]
            params = [request.sampling for request, _ in growing]
            last, log_probs = choose_chain_tokens(logits, self._draft_ids, positions, params)
            for index, (token, log_prob) in enumerate(zip(last.tolist(), log_probs.tolist(), strict=True)):
                chains[index].tokens.append(token)
                chains[index].log_probs.append(log_prob)
                chains[index].state = states[index : index + 1]
            keep = [i for i, (r, _) in enumerate(growing) if len(chains[i].tokens) < r.num_tokens]
            if len(keep) < len(growing):
                growing = [growing[i] for i in keep]
                last = last[keep]

    def _run_drafted(
        self, growing: Sequence[tuple[DraftRequest, SequenceState]], states: Tensor, last: Tensor
    ) -> Tensor:
        """Run one drafted row for each sequence whose chain has begun; `states` of the others pass through."""
        rows, places, most = [], [], 0
        for index, (_, state) in enumerate(growing):
            chain = state.chain
            assert chain is not None
            if chain.tokens:
                # Token start + k - 1 stands in row start + k - 2, the row of the position before it.
                position = chain.start + len(chain.tokens) - 2
                where = torch.tensor([position], device=self._layer.where)
                rows.append(Rows(state.slot, last[index : index + 1], chain.state, where))
                places.append(index)
                most = max(most, position)
        out = self._layer.forward(rows, most)
        if len(places) == len(growing):
            return out
        merged = states.clone()
        merged[places] = out
        return merged

    def _grow_tree(self, state: SequenceState, request: DraftRequest) -> DraftEntry:
        """Expand a dynamic tree and keep its likeliest nodes (EAGLE-2, 2406.16858, section 4)."""
        assert state.last_state is not None
        slot = state.slot
        slot.num_pending = 0
        state.chain = None
        start, stable = len(state.tokens), slot.length
        width = min(MAX_WIDTH, max(2, request.max_nodes // request.num_tokens + 1))
        self._reserve([state], [width * request.num_tokens])
        tree = GrowingTree(width, request.max_nodes)
        states = state.last_state
        for depth in range(request.num_tokens):
            log_probs, ids = self._layer.logits(states).log_softmax(-1).topk(width, dim=-1)
            tree.expand(log_probs, self._draft_ids[ids])
            if depth == request.num_tokens - 1:
                break
            tokens, parents, ancestors = tree.frontier()
            visible = torch.zeros((len(tokens), stable + ancestors.shape[1]), dtype=self._layer.dtype)
            visible[:, stable:].masked_fill_(~ancestors, -torch.inf)
            positions = torch.full((len(tokens),), start - 1 + depth, dtype=torch.int64)
            part = Rows(
                slot,
                tokens.to(self._layer.where),
                states[parents],
                positions.to(self._layer.where),
                visible.to(self._layer.where),
            )
            states = self._layer.forward([part], start - 1 + depth)
        slot.num_pending = 0
        return tree.entry(start)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _last_token(state: SequenceState) -> int:
    assert state.chain is not None
    return state.chain.tokens[-1] if state.chain.tokens else state.tokens[-1]
