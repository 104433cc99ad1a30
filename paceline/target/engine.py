"""The target engine: one ragged forward step over many sequences.

A step checks its rows, grows their slots, plans who sees whom, runs the executor, and returns logits and features per
sequence. The caller says which rows to keep. The engine does not know requests, drafts, sampling or transports. Called
by the verifier, by co-located drafters and by training.

A sequence of committed length n has y[0..n-2] in its slot; a decode step runs `[root, draft nodes...]` and
`keep` settles the root and the accepted rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.model.device import Device, configure_threads
from paceline.model.weights import UnsupportedModelError
from paceline.target.attention.planning import plan_step
from paceline.target.executor import Executor, ModelShape, nothing
from paceline.target.executors.backend import ExecutorChoice, load_executor, pool_for
from paceline.target.kv.cache import MIN_CAPACITY_TOKENS, KVCache
from paceline.target.kv.slot import KVLayout, SlotError
from paceline.target.step import SequenceRows, StepError, StepOutput
from paceline.target.taps import Taps, TapSpec


class TargetEngine:
    """A model, its cache and its taps. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        executor: Executor,
        device: Device,
        weight_dtype: torch.dtype,
        *,
        taps: Iterable[TapSpec] = (),
        kv_limit_bytes: int | None = None,
        row_buckets: Sequence[int] = (),
    ) -> None:
        self.device = device
        self.weight_dtype = weight_dtype
        self.dtype = dtype = device.compute_dtype(weight_dtype)  # of activations, features and the cache
        self.executor = executor
        shape = executor.shape
        layout = KVLayout(
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            dtype,
            device.torch_device,
            shape.layer_heads,
            executor.joins_neighbours,
        )
        self.cache = KVCache(layout, kv_limit_bytes, pool_for(device))
        self._row_buckets = tuple(sorted(row_buckets))
        self._taps = Taps(shape, device, weight_dtype)
        # Rows of each slot's unsettled step: parents, or None for a chain.
        self._unsettled: dict[int, tuple[int, ...] | None] = {}
        for spec in taps:
            self.add_tap(spec)

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        taps: Iterable[TapSpec] = (),
        num_threads: int | None = None,
        executor: ExecutorChoice = "auto",
        packed: bool = True,
        kv_limit_bytes: int | None = None,
        row_buckets: Sequence[int] = (),
    ) -> TargetEngine:
        """Load a model from a local directory.

        Args:
            model_dir: a directory with `config.json` and safetensors weights.
            device: `"cpu"`, `"cuda"` or `"cuda:N"`.
            dtype: of the weights, and on CUDA of everything. On CPU float16 weights are multiplied in float32:
                `engine.dtype`, the type of features and cache, is float32 then. None chooses for the device.
            taps: features to return from each step.
            num_threads: torch threads of this process; None leaves them alone.
            executor: see :data:`paceline.target.executors.backend.ExecutorChoice`.
            packed: False keeps plain weight layouts on CPU.
            kv_limit_bytes: bound on all slots together.
            row_buckets: pad a step's rows up to the next of these counts, so that steps of different draft
                lengths run the same matrix kernels. Off when empty.

        Raises:
            UnsupportedModelError: no executor runs the checkpoint exactly.
        """
        if num_threads is not None:
            configure_threads(num_threads)
        path = Path(model_dir)
        if not (path / "config.json").is_file():
            raise UnsupportedModelError(f"{path.name!r} has no config.json")
        where = Device.parse(device)
        dtype = dtype or where.default_dtype()
        runner = load_executor(executor, path, where, dtype, packed=packed)
        return cls(runner, where, dtype, taps=taps, kv_limit_bytes=kv_limit_bytes, row_buckets=row_buckets)

    @property
    def shape(self) -> ModelShape:
        """Layer count, widths, vocabulary and position limit of the model."""
        return self.executor.shape

    @property
    def taps(self) -> list[TapSpec]:
        """Taps in the order of `StepOutput.tap_features`."""
        return self._taps.specs

    def add_tap(self, spec: TapSpec) -> int:
        """Add a tap; returns its index in `StepOutput.tap_features`.

        Raises:
            StepError: it does not fit the model.
        """
        return self._taps.add(spec)

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """The target's input embeddings `[n, hidden]`."""
        with torch.inference_mode():
            return self.executor.embed(torch.as_tensor(tokens, device=self.device.torch_device))

    def head(self, hidden: Tensor) -> Tensor:
        """The target's LM head on normed states: `[n, hidden] -> [n, vocab]` float32."""
        with torch.inference_mode():
            return self.executor.head(hidden.to(self.dtype))

    def open(self, capacity_tokens: int = MIN_CAPACITY_TOKENS) -> int:
        """Open a slot with room for so many tokens at first.

        Raises:
            KVCacheFullError: the byte limit would be passed.
        """
        return self.cache.open(capacity_tokens)

    def close(self, slot: int) -> None:
        """Free a slot."""
        self.cache.close(slot)
        self._unsettled.pop(slot, None)

    def fork(self, slot: int, length: int, capacity_tokens: int = 0) -> int:
        """Open a slot that starts with the first `length` cached tokens of another, copied, not run again.

        Raises:
            SlotError: the slot has fewer settled tokens, or holds an unsettled tree.
            KVCacheFullError: the byte limit would be passed.
        """
        self._settle(slot)
        return self.cache.fork(slot, length, capacity_tokens)

    def length(self, slot: int) -> int:
        """Cached tokens, those of an unsettled chain included."""
        entry = self.cache.get(slot)
        return entry.length + entry.num_pending

    def keys_values(self, slot: int, layer: int) -> tuple[Tensor, Tensor]:
        """Cached keys and values of one layer: read-only views `[num_kv_heads, length, head_dim]`."""
        entry = self.cache.get(slot)
        keys, values = entry.view(layer, 0, entry.length + entry.num_pending)
        return keys[0], values[0]

    def keep(self, slot: int, row_indices: Sequence[int]) -> None:
        """Settle rows of the slot's last step (the root is row 0) and drop the others.

        Args:
            slot: the slot.
            row_indices: a path: the first is a child of the prefix, each later one a child of the one before.
                A chain step that keeps all its rows needs no call.

        Raises:
            SlotError: there is no unsettled step, or the rows are not a path of it.
        """
        if slot not in self._unsettled:
            raise SlotError(f"slot {slot} has no step to keep rows of")
        parents = self._unsettled[slot]
        previous = -1
        for row in row_indices:
            parent = row - 1 if parents is None else parents[row] if 0 <= row < len(parents) else None
            if parent != previous:
                raise SlotError(f"rows {list(row_indices)} are not a path of slot {slot}'s last step")
            previous = row
        self.cache.get(slot).keep(row_indices)
        del self._unsettled[slot]

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything from position `length` on; only settled rows and unsettled chains can be cut."""
        self._settle(slot)
        self.cache.get(slot).truncate(length)

    def _settle(self, slot: int) -> None:
        """Settle an unsettled chain in full; a tree must be settled by `keep`."""
        if slot in self._unsettled:
            if self._unsettled[slot] is not None:
                raise SlotError(f"slot {slot} holds an unsettled tree: keep a path of it first")
            entry = self.cache.get(slot)
            entry.length += entry.num_pending
            entry.num_pending = 0
            del self._unsettled[slot]

    def step(
        self,
        batch: Sequence[SequenceRows],
        *,
        projects_features: bool = True,
        on_begin: Callable[[], None] = nothing,
    ) -> StepOutput:
        """Run one forward pass over several sequences with different row counts.

        Args:
            batch: rows of each sequence.
            projects_features: False leaves features as captured, `[n_i, num_sources * hidden]`, for `project`.
            on_begin: called before the pass: on the CPU kernels right before they run without the interpreter,
                elsewhere before the first operator.

        Raises:
            StepError: rows are malformed; nothing was changed.
            SlotError: a slot is not open, or holds an unsettled tree.
            KVCacheFullError: no room; nothing was changed.
        """
        if not batch:
            no_rows = torch.empty((0, self.shape.vocab_size), device=self.device.torch_device)
            return StepOutput(no_rows, [], [], tap_features=[[] for _ in self.taps])
        if len({rows.slot for rows in batch}) != len(batch):
            raise StepError("a slot may appear once in a step")
        for rows in batch:
            rows.check(self.length(rows.slot), self.shape)
        for rows in batch:
            self._settle(rows.slot)
        self.cache.reserve([(rows.slot, len(rows.tokens)) for rows in batch])
        wants_features = [rows.wants_features for rows in batch]
        with torch.inference_mode():
            step = plan_step(
                batch,
                [self.cache.get(rows.slot) for rows in batch],
                self._taps.capture() if any(wants_features) else frozenset(),
                self._row_buckets,
                self.device.torch_device,
                joins_neighbours=self.executor.joins_neighbours,
            )
            result = self.executor.forward(step.plan, on_begin)
            output = StepOutput(
                result.logits, step.logit_firsts(), step.in_batch_order(step.logit_counts), result.maxima
            )
            output.tap_features = self._taps.features(
                step, wants_features, result, projected=projects_features
            )
        for index, segment in step.segments:
            segment.slot.num_pending = segment.num_rows
            self._unsettled[batch[index].slot] = segment.parents
        return output

    def project(self, captured: Tensor, tap: int = 0) -> Tensor:
        """Features `[n, width]` of rows that a step captured without projecting them."""
        with torch.inference_mode():
            return self._taps.project(captured, tap)
