"""What all drafters do that go on from their own layer's output: the same drafts whatever came before and beside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from paceline.draft_layer import LayerOutput, Rows
from paceline.methods.autoregressive.drafter import AutoregressiveDrafter
from paceline.methods.drafter import Drafter, DrafterError, DraftRequest
from paceline.methods.loading import load_drafter
from paceline.sampling.params import SamplingParams
from tests.methods.conftest import VOCAB, Target, text

Load = Callable[[Path], Drafter]


@pytest.fixture(params=["deepseek_mtp", "deepseek_mtp3", "eagle1", "eagle2", "eagle3", "gemma4_mtp"])
def checkpoint(request: pytest.FixtureRequest, drafter_dirs: dict[str, Path]) -> Path:
    return drafter_dirs[request.param]


@pytest.fixture
def drafter(load: Load, checkpoint: Path) -> Drafter:
    return load(checkpoint)


def _start(drafter: Drafter, target: Target, sequence_id: int, tokens: list[int]) -> None:
    drafter.open(sequence_id, tokens)
    drafter.feed(sequence_id, 0, target.features(drafter, tokens)[:-1])


def _draft(drafter: Drafter, sequence_id: int, num_tokens: int, max_nodes: int = 0) -> tuple[int, ...]:
    (entry,) = drafter.draft([DraftRequest(sequence_id, num_tokens, max_nodes)])
    assert entry is not None
    return entry.tokens


def test_batched_equals_single(load: Load, checkpoint: Path, target: Target) -> None:
    texts = {1: text(5, 1), 2: text(17, 2), 3: text(30, 3)}
    lengths = {1: 6, 2: 2, 3: 4}
    single = {}
    for key, tokens in texts.items():
        alone = load(checkpoint)
        _start(alone, target, key, tokens)
        single[key] = _draft(alone, key, lengths[key])
    together = load(checkpoint)
    for key, tokens in texts.items():
        _start(together, target, key, tokens)
    entries = together.draft([DraftRequest(key, lengths[key]) for key in texts])
    assert [entry.tokens for entry in entries if entry is not None] == list(single.values())
    assert [entry.start for entry in entries if entry is not None] == [5, 17, 30]


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 5])
def test_after_a_verification_equals_a_fresh_drafter(
    load: Load, checkpoint: Path, target: Target, num_accepted: int
) -> None:
    tokens = text(11, seed=8)
    drafter = load(checkpoint)
    _start(drafter, target, 1, tokens)
    drafted = list(_draft(drafter, 1, 5))
    final = next(t for t in range(3, VOCAB) if t not in drafted)
    committed = [*drafted[:num_accepted], final]
    drafter.extend(1, len(tokens), committed)
    whole = [*tokens, *committed]
    features = target.features(drafter, whole)
    drafter.feed(1, len(tokens) - 1, features[len(tokens) - 1 : len(whole) - 1])
    fresh = load(checkpoint)
    _start(fresh, target, 1, whole)
    assert _draft(drafter, 1, 5) == _draft(fresh, 1, 5)


def test_a_longer_wish_continues_the_chain(load: Load, checkpoint: Path, target: Target) -> None:
    tokens = text(9, seed=4)
    drafter, fresh = load(checkpoint), load(checkpoint)
    assert isinstance(drafter, AutoregressiveDrafter)
    _start(drafter, target, 1, tokens)
    _start(fresh, target, 1, tokens)
    first = _draft(drafter, 1, 3)
    rows: list[int] = []
    forward = drafter._layer.forward

    def counting(parts: object, wanted: object) -> LayerOutput:
        output = forward(parts, wanted)  # type: ignore[arg-type]
        rows.append(output.states.shape[0])
        return output

    drafter._layer.forward = counting  # type: ignore[method-assign, assignment]
    longer = _draft(drafter, 1, 6)
    assert longer == _draft(fresh, 1, 6)
    assert longer[:3] == first
    assert rows == [1, 1, 1]  # three new tokens, nothing recomputed


def test_features_may_come_late_and_twice(load: Load, checkpoint: Path, target: Target) -> None:
    tokens = text(12, seed=6)
    drafter = load(checkpoint)
    features = target.features(drafter, tokens)
    drafter.open(1, tokens)
    assert drafter.draft([DraftRequest(1, 3)]) == [None]
    drafter.feed(1, 0, features[:6])
    assert drafter.draft([DraftRequest(1, 3)]) == [None]
    drafter.feed(1, 2, features[2:11])
    fresh = load(checkpoint)
    _start(fresh, target, 1, tokens)
    assert _draft(drafter, 1, 3) == _draft(fresh, 1, 3)
    with pytest.raises(DrafterError, match="missing"):
        drafter.feed(1, 13, features[:1])
    with pytest.raises(DrafterError, match="missing"):
        drafter.extend(1, 13, [5])


def test_out_of_positions_drafts_nothing(drafter: Drafter, target: Target) -> None:
    tokens = text(62, seed=6)
    _start(drafter, target, 1, tokens)
    assert drafter.draft([DraftRequest(1, 3)]) == [None]
    assert len(_draft(drafter, 1, 2)) == 2


def test_slots_that_grew_are_used_again(
    checkpoint: Path, target_dir: Path, target: Target, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["shape"]["max_positions"] = 512
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(checkpoint / "model.safetensors", tmp_path)
    drafter = load_drafter(tmp_path, target_dir, dtype=torch.float32)
    tokens = text(150, seed=5)
    features = target.features(drafter, tokens)
    drafted = []
    for sequence_id in range(8):
        begun = (
            2 if sequence_id < 4 else 100
        )  # the first four grow to the capacity that the others begin with
        drafter.open(sequence_id, tokens[:begun])
        drafter.extend(sequence_id, begun, tokens[begun:])
        drafter.feed(sequence_id, 0, features[:-1])
        drafted.append(_draft(drafter, sequence_id, 4))
        if sequence_id == 3:
            drafter.close(1)
    assert drafted == drafted[:1] * 8


def test_a_pass_that_fails_takes_no_features_away(load: Load, checkpoint: Path, target: Target) -> None:
    drafter, fresh = load(checkpoint), load(checkpoint)
    assert isinstance(drafter, AutoregressiveDrafter)
    for sequence_id in (1, 2):
        _start(drafter, target, sequence_id, text(9, seed=sequence_id))
        _start(fresh, target, sequence_id, text(9, seed=sequence_id))
    forward = drafter._layer.forward

    def failing(parts: object, wanted: object) -> LayerOutput:
        raise RuntimeError("another sequence's fault")

    drafter._layer.forward = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError):
        drafter.draft([DraftRequest(1, 3), DraftRequest(2, 3)])
    drafter._layer.forward = forward  # type: ignore[method-assign]
    for sequence_id in (1, 2):
        assert _draft(drafter, sequence_id, 3) == _draft(fresh, sequence_id, 3)


def test_tokens_and_features_may_come_in_any_order(load: Load, checkpoint: Path, target: Target) -> None:
    tokens = text(30, seed=12)
    fresh = load(checkpoint)
    _start(fresh, target, 1, tokens)
    features = target.features(fresh, tokens)
    expected = _draft(fresh, 1, 4), _draft(fresh, 1, 4, 9)
    for order in range(6):
        drafter = load(checkpoint)
        random = torch.Generator().manual_seed(order)
        drafter.open(1, tokens[:3])
        known, fed = 3, 0
        while known < 30 or fed < 29:
            step = int(torch.randint(1, 6, (), generator=random))
            if bool(torch.rand((), generator=random) < 0.5) and known < 30:
                drafter.extend(1, known, tokens[known : known + step])
                known = min(30, known + step)
            elif fed < 29:
                drafter.feed(1, max(0, fed - 1), features[max(0, fed - 1) : min(29, fed + step)])
                fed = min(29, fed + step)
            if step > 3:
                drafter.draft([DraftRequest(1, step, step + (order % 2) * 4)])
        assert (_draft(drafter, 1, 4), _draft(drafter, 1, 4, 9)) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
def test_trees_in_company_are_as_alone(
    load: Load, checkpoint: Path, target: Target, temperature: float
) -> None:
    """Trees of different depths and widths, and a chain, drafted together in as many passes as the deepest takes."""
    sampling = SamplingParams(temperature=temperature, seed=3)
    together, entries = load(checkpoint), []
    requests = [DraftRequest(i, 3 + i, nodes, sampling) for i, nodes in ((1, 9), (2, 30), (3, 0), (4, 12))]
    for request in requests:
        alone, tokens = load(checkpoint), text(6 + request.sequence_id, request.sequence_id)
        for drafter in (alone, together):
            _start(drafter, target, request.sequence_id, tokens)
        entries += alone.draft([request])
    assert isinstance(together, AutoregressiveDrafter)
    forward, passes = together._layer.forward, []

    def counting(parts: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        passes.append([part.paths is not None for part in parts])
        return forward(parts, wanted)

    together._layer.forward = counting  # type: ignore[method-assign, assignment]
    found = together.draft(requests)
    assert [(e.tokens, e.parents) for e in found if e] == [(e.tokens, e.parents) for e in entries if e]
    assert [e.log_probs for e in found if e] == [pytest.approx(e.log_probs, abs=1e-4) for e in entries if e]
    deepest = max(request.num_tokens for request in requests if request.max_nodes) - 1
    assert 1 <= sum(all(part) for part in passes) <= deepest
    assert sum(any(part) for part in passes) <= deepest
