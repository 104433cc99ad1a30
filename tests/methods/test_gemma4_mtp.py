"""Gemma 4's assistant served: its drafts are transformers' own, over features, in place, and in company."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma4AssistantForCausalLM,
)

from paceline.checkpoints.exchange import export_checkpoint, import_checkpoint
from paceline.drafts import DraftEntry
from paceline.methods.checkpoint import CheckpointError
from paceline.methods.drafter import Drafter, DrafterError, DraftRequest, OutcomeRequest, ReadsInPlace
from paceline.methods.gemma4_mtp.model import FULL, ORDER, SLIDING
from paceline.methods.loading import load_drafter
from paceline.sampling.params import SamplingParams
from paceline.target import SequenceRows, StepError, TapSpec, TargetEngine
from paceline.target.kv.slot import Slot
from tests.methods.conftest import Target, text
from tests.methods.gemma4_checkpoint import (
    FOR_GEMMA,
    FOR_GEMMA4,
    FOR_LLAMA,
    save_assistant,
    save_gemma3,
    save_gemma4,
)

VOCAB = 108


CLUSTERED = {"num_clusters": 12, "num_selected": 3}
CASES = {
    "gemma3": (save_gemma3, FOR_GEMMA),
    "gemma4": (save_gemma4, FOR_GEMMA4),
    "gemma4, clusters": (save_gemma4, {**FOR_GEMMA4, **CLUSTERED}),
}


class Pair:
    """A target and its assistant, by transformers and by us."""

    def __init__(self, path: Path, case: str) -> None:
        make, self.shape = CASES[case]
        self.target_dir = make(path / "target")
        self.directory = save_assistant(path / "drafter", self.target_dir, dict(self.shape))
        export_checkpoint(self.directory, "gemma4_assistant", path / "public")
        self.public = path / "public"
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.target_dir, dtype=torch.float32).eval()
        self.assistant = Gemma4AssistantForCausalLM.from_pretrained(self.public, dtype=torch.float32).eval()

    def load(self) -> Drafter:
        return load_drafter(self.directory, self.target_dir, dtype=torch.float32)

    def engine(self, tap: TapSpec | None) -> TargetEngine:
        return TargetEngine.load(self.target_dir, dtype=torch.float32, taps=[] if tap is None else [tap])

    def logits(self, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """What transformers' assistant gives behind a text and drafted tokens, `[drafted + 1, vocab]`."""
        with torch.no_grad():
            cache = DynamicCache()
            out = self.model.model(torch.tensor([list(tokens[:-1])]), past_key_values=cache, use_cache=True)
            state, end = out.last_hidden_state[:, -1:], len(tokens) - 1
            layers: dict[str, int] = dict(self.shape["kv_layers"])  # type: ignore[call-overload]
            shared = {
                kind: (cache.layers[at].keys[:, :, :end], cache.layers[at].values[:, :, :end])
                for kind, at in layers.items()
            }
            rows, table = [], self.model.get_input_embeddings()
            for token in (tokens[-1], *drafted):
                step = self.assistant(
                    inputs_embeds=torch.cat([table(torch.tensor([[token]])), state], dim=-1),
                    position_ids=torch.tensor([[end]]),
                    shared_kv_states=shared,
                )
                rows.append(step.logits[0, -1])
                state = step.last_hidden_state
        logits = torch.stack(rows)
        if (
            "num_clusters" in self.shape
        ):  # where tokens that are not scored get a little, we give them nothing
            logits = logits.masked_fill(logits == logits.min(-1, keepdim=True).values, -torch.inf)
        return logits


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"), request.param)


def features(pair: Pair, drafter: Drafter, tokens: Sequence[int]) -> Tensor:
    engine = pair.engine(drafter.tap)
    return engine.step([SequenceRows(engine.open(), list(tokens), num_logits="none")]).features[0].clone()


def start(pair: Pair, drafter: Drafter, tokens: list[int], sequence_id: int = 1) -> None:
    drafter.open(sequence_id, tokens)
    drafter.feed(sequence_id, 0, features(pair, drafter, tokens)[:-1])


def draft(drafter: Drafter, num_tokens: int, max_nodes: int = 0, sequence_id: int = 1) -> DraftEntry:
    (entry,) = drafter.draft([DraftRequest(sequence_id, num_tokens, max_nodes)])
    assert entry is not None
    entry.check(max(num_tokens, max_nodes), VOCAB)
    return entry


@pytest.mark.parametrize("length", [2, 5, 9, 30])
def test_a_chain_is_that_of_transformers(pair: Pair, length: int) -> None:
    drafter, tokens = pair.load(), text(length, seed=length)
    start(pair, drafter, tokens)
    entry = draft(drafter, 6)
    logits = pair.logits(tokens, entry.tokens[:-1])
    assert list(entry.tokens) == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1)[range(6), list(entry.tokens)]
    torch.testing.assert_close(torch.tensor(entry.log_probs), expected, rtol=1e-3, atol=1e-3)
    assert len(set(entry.tokens)) > 1


def test_every_node_of_a_tree_has_its_path_s_probability(pair: Pair) -> None:
    drafter, tokens = pair.load(), text(14, seed=5)
    start(pair, drafter, tokens)
    entry = draft(drafter, 4, 40)
    paths: list[tuple[int, ...]] = []
    for token, parent, log_prob in zip(entry.tokens, entry.parents, entry.log_probs, strict=True):
        before = paths[parent] if parent >= 0 else ()
        assert log_prob == pytest.approx(
            float(pair.logits(tokens, before)[-1].log_softmax(-1)[token]), abs=1e-3
        )
        paths.append((*before, token))
    assert max(map(len, paths)) >= 3


def test_what_follows_outcomes_has_its_path_s_probability(pair: Pair) -> None:
    drafter, tokens = pair.load(), text(14, seed=6)
    start(pair, drafter, tokens)
    sent = draft(drafter, 3, 5)
    (entry,) = drafter.draft_outcomes([OutcomeRequest(1, 2, 3, 40)])
    assert entry is not None
    paths: list[tuple[int, ...]] = []
    for token, parent, log_prob in zip(entry.tokens, entry.parents, entry.log_probs, strict=True):
        before = paths[parent] if parent >= 0 else ()
        expected = pair.logits(tokens, before)[-1].log_softmax(-1)[token]
        assert log_prob == pytest.approx(float(expected), abs=1e-3)
        paths.append((*before, token))
    assert len(set(paths)) == len(paths) > len(sent.tokens)


class InPlace:
    """A drafter beside an engine whose cache it reads."""

    def __init__(self, pair: Pair) -> None:
        self.drafter = pair.load()
        self.engine = pair.engine(None)
        self.slots: dict[int, int] = {}
        assert isinstance(self.drafter, ReadsInPlace)
        self.drafter.read_in_place(self._find)
        assert self.drafter.tap is not None
        self.engine.add_tap(self.drafter.tap)

    def _find(self, sequence_id: int) -> Slot | None:
        return self.engine.cache.get(self.slots[sequence_id]) if sequence_id in self.slots else None

    def run(self, sequence_id: int, first: int, tokens: list[int], keep: Sequence[int]) -> None:
        """Run rows from position `first` on, keep some, and hand over what the newest of them gives."""
        if sequence_id not in self.slots:
            self.slots[sequence_id] = self.engine.open()
        rows = self.engine.step([SequenceRows(self.slots[sequence_id], tokens, num_logits="none")]).features[
            0
        ]
        self.engine.keep(self.slots[sequence_id], list(keep))
        self.drafter.feed(sequence_id, first + len(keep) - 1, rows[[keep[-1]]])


def test_the_cache_in_place_gives_the_same_drafts(pair: Pair) -> None:
    """Also after a step that kept one of its drafted rows, and with rejected ones behind it in the slot."""
    tokens, beside = text(20, seed=3), InPlace(pair)
    beside.drafter.open(1, tokens[:12])
    assert beside.drafter.draft([DraftRequest(1, 3)]) == [None]  # the target has not begun
    beside.run(1, 0, tokens[:11], range(11))
    away = pair.load()
    start(pair, away, tokens[:12])
    assert draft(beside.drafter, 4).tokens == draft(away, 4).tokens
    assert draft(beside.drafter, 4, 12).tokens == draft(away, 4, 12).tokens
    beside.run(1, 11, [tokens[11], tokens[12], 7, 8], [0, 1])  # the last two are rejected
    beside.drafter.extend(1, 12, tokens[12:14])
    fresh = features(pair, away, tokens[:13])
    away.extend(1, 12, tokens[12:14])
    away.feed(1, 11, fresh[11:])
    one, other = draft(beside.drafter, 5), draft(away, 5)
    assert one.tokens == other.tokens
    assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    del beside.slots[1]  # it lost its slot
    beside.drafter.extend(1, 14, [5])
    assert beside.drafter.draft([DraftRequest(1, 3)]) == [None]


def test_what_is_pending_in_the_targets_slot_is_the_targets(pair: Pair) -> None:
    tokens, beside = text(12, seed=3), InPlace(pair)
    beside.drafter.open(1, tokens)
    beside.run(1, 0, tokens[:11], range(11))
    expected = draft(beside.drafter, 4).tokens
    beside.drafter.open(1, tokens)
    beside.drafter.feed(1, 10, features(pair, beside.drafter, tokens[:11])[-1:])
    slot = beside.engine.cache.get(beside.slots[1])
    beside.engine.step([SequenceRows(beside.slots[1], [tokens[11], 7], num_logits="none")])
    assert draft(beside.drafter, 4).tokens == expected
    draft(beside.drafter, 4, 12)
    assert (slot.length, slot.num_pending) == (11, 2)
    beside.engine.keep(beside.slots[1], [0, 1])


def test_rows_that_did_not_travel_are_not_missed(pair: Pair) -> None:
    """A window's older rows, and final norms but the newest: `NaN` there, and all drafts are the same."""
    tokens, whole, thin = text(24, seed=9), pair.load(), pair.load()
    start(pair, whole, tokens)
    rows = features(pair, thin, tokens)[:-1]
    assert thin.tap is not None
    parts = thin.tap.parts(64)
    for column, part in zip(rows.split([part.width for part in parts], dim=1), parts, strict=True):
        if part.reach:
            column[: max(len(column) - part.reach, 0)] = torch.nan
    thin.open(1, tokens)
    thin.feed(1, 0, rows)
    assert draft(thin, 5).log_probs == draft(whole, 5).log_probs
    # Of a shorter text the final norm is not there: nothing is drafted, and nothing is wrong.
    thin.open(2, tokens[:-3])
    thin.feed(2, 0, rows)
    assert thin.draft([DraftRequest(2, 5)]) == [None]
    thin.extend(2, len(tokens) - 3, tokens[-3:])
    assert draft(thin, 5, sequence_id=2).tokens == draft(whole, 5).tokens


def test_company_changes_nothing(pair: Pair) -> None:
    """Chains, trees and draws of several texts in one pass are those of each alone."""
    texts = [text(length, seed=length) for length in (4, 11, 30)]
    drafter = pair.load()
    for index, tokens in enumerate(texts):
        start(pair, drafter, tokens, index)
    sampled = SamplingParams(temperature=0.9, seed=3)
    requests = [DraftRequest(0, 5), DraftRequest(1, 4, 12), DraftRequest(2, 5, sampling=sampled)]
    together = drafter.draft(requests)
    for request, tokens, entry in zip(requests, texts, together, strict=True):
        alone = pair.load()
        start(pair, alone, tokens, request.sequence_id)
        (own,) = alone.draft([request])
        assert own is not None
        assert entry is not None
        assert own.tokens == entry.tokens
        assert own.log_probs == pytest.approx(entry.log_probs, abs=1e-4)


def test_a_public_checkpoint_becomes_the_same_one(pair: Pair, tmp_path: Path) -> None:
    config = import_checkpoint(pair.public, pair.target_dir, tmp_path / "own")
    assert config.shape["kv_layers"] == pair.shape["kv_layers"]
    assert config.shape["kv_heads"] == pair.shape["kv_heads"]
    tokens, imported, original = text(12, seed=1), None, pair.load()
    imported = load_drafter(tmp_path / "own", pair.target_dir, dtype=torch.float32)
    for drafter in (imported, original):
        start(pair, drafter, tokens)
    assert draft(imported, 5).log_probs == draft(original, 5).log_probs
    with pytest.raises(CheckpointError, match="paceline checkpoints import"):
        load_drafter(pair.public, pair.target_dir)


def test_what_cannot_be_served_is_named(target_dir: Path, tmp_path: Path) -> None:
    for changes, words in (
        ({"layer_types": [SLIDING]}, "layer_types"),
        ({"layer_types": []}, "layer_types"),
        ({"layer_types": [FULL, [FULL]]}, "layer_types"),
        ({"kv_layers": {}}, f"kv_layers.{FULL}"),
        ({"kv_layers": []}, f"kv_layers.{FULL}"),
        ({"kv_heads": {FULL: 3}}, f"kv_heads.{FULL}"),
        ({"kv_heads": {FULL: 2.0}}, f"kv_heads.{FULL}"),
        ({"head_dims": {FULL: -1}}, f"head_dims.{FULL}"),
        ({"head_dims": {FULL: 16.5}}, f"head_dims.{FULL}"),
        ({"head_dims": {FULL: 15}}, f"head_dims.{FULL} must be even"),
        ({"rope_thetas": {FULL: "x"}}, f"rope_thetas.{FULL}"),
        ({"rope_thetas": {FULL: float("inf")}}, f"rope_thetas.{FULL}"),
        (
            {"rotary_fractions": {FULL: 1.5}},
            f"rotary_fractions.{FULL} must be a positive number of at most 1",
        ),
        ({"rms_eps": "x"}, "shape.rms_eps"),
        ({"num_clusters": "x"}, "num_clusters"),
        ({"embedding_scale": 0}, "embedding_scale"),
        ({"embedding_scale": float("nan")}, "embedding_scale"),
        ({"backbone": 32}, "pre_projection"),
    ):
        save_assistant(tmp_path, target_dir, FOR_LLAMA)
        content = json.loads((tmp_path / "config.json").read_text())
        content["shape"] |= changes
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=words.replace(".", r"\.") if "." in words else words):
            load_drafter(tmp_path, target_dir, dtype=torch.float32)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (torch.zeros(VOCAB, dtype=torch.int64), "every token once"),
        (torch.arange(VOCAB) - 1, "every token once"),
        (torch.arange(VOCAB).float(), "whole numbers"),
    ],
)
def test_an_order_that_is_none_is_refused(order: Tensor, words: str, tmp_path: Path) -> None:
    target_dir = save_gemma4(tmp_path / "target")
    directory = save_assistant(tmp_path / "drafter", target_dir, {**FOR_GEMMA4, **CLUSTERED})
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {ORDER: order}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        load_drafter(directory, target_dir, dtype=torch.float32)
    # Of another whole type it is as good.
    save_file(tensors | {ORDER: tensors[ORDER].int()}, directory / "model.safetensors")
    drafter = load_drafter(directory, target_dir, dtype=torch.float32)
    assert drafter.tap is not None
    tokens = text(6, seed=1)
    rows = torch.randn(5, drafter.tap.width(64), generator=torch.Generator().manual_seed(1))
    drafter.open(1, tokens)
    drafter.feed(1, 0, rows)
    assert len(draft(drafter, 3).tokens) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_layers": {FULL: 4}}, "outside 0..3"),
        ({"head_dims": {FULL: 32}}, "2 key heads of width 16"),
    ],
)
def test_a_tap_that_the_target_cannot_give_is_refused(
    changes: dict[str, object], words: str, target_dir: Path, tmp_path: Path
) -> None:
    drafter = load_drafter(
        save_assistant(tmp_path, target_dir, FOR_LLAMA | changes), target_dir, dtype=torch.float32
    )
    assert drafter.tap is not None
    with pytest.raises(StepError, match=words):
        TargetEngine.load(target_dir, dtype=torch.float32, taps=[drafter.tap])


def test_features_out_of_order_are_refused(
    gemma4_mtp_dir: Path, load: Callable[[Path], Drafter], target: Target
) -> None:
    drafter, tokens = load(gemma4_mtp_dir), text(8, seed=2)
    rows = target.features(drafter, tokens)
    drafter.open(1, tokens)
    with pytest.raises(DrafterError, match="0 to 1 are missing"):
        drafter.feed(1, 2, rows[2:])
    with pytest.raises(DrafterError, match=r"features must be \[n, 128\]"):
        drafter.feed(1, 0, rows[:, :-1])
