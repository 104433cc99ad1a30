"""Trees grown in one call of the kernels: node for node what passes one by one give, and nothing out of range."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.cpu import kernels
from paceline.draft_layer import TreeGrower, TreeWanted
from paceline.methods.autoregressive.drafter import AutoregressiveDrafter
from paceline.methods.deepseek_mtp import layer as deepseek_mtp_layer
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.methods.eagle import feature_layer as eagle1_layer
from paceline.methods.loading import load_drafter
from paceline.sampling.params import SamplingParams
from tests.methods.native import random_features, random_text, save_eagle3, save_random, save_target

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="the CPU kernels do not run here")

Load = Callable[[], AutoregressiveDrafter]


@pytest.fixture(scope="module", params=["deepseek_mtp", "eagle2", "eagle3"])
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads a random drafter whose trees grow by its own probabilities."""
    method, path = request.param, tmp_path_factory.mktemp("drafter")
    if method == "eagle3":
        path, target_dir = save_eagle3(path, tmp_path_factory.mktemp("target"))
    else:
        target_dir = save_target(tmp_path_factory.mktemp("target"))
        of_eagle2 = method == "eagle2"
        variant = {"fc_bias": True} if of_eagle2 else {"carries_norm": True}
        shapes = eagle1_layer.parameter_shapes if of_eagle2 else deepseek_mtp_layer.parameter_shapes
        save_random(path, target_dir, method, variant, shapes)

    def load_it() -> AutoregressiveDrafter:
        drafter = load_drafter(Path(path), target_dir, dtype=torch.bfloat16)
        assert isinstance(drafter, AutoregressiveDrafter)
        assert isinstance(drafter._layer, TreeGrower)
        return drafter

    return load_it


@pytest.fixture
def pair(load: Load, monkeypatch: pytest.MonkeyPatch) -> tuple[AutoregressiveDrafter, AutoregressiveDrafter]:
    """One that grows trees in one call, and one that runs pass after pass."""
    at_once, stepwise = load(), load()
    monkeypatch.setattr(stepwise, "_ranks_by_draft", lambda requests: False)
    return at_once, stepwise


def begin(drafter: AutoregressiveDrafter, lengths: list[int]) -> None:
    for sequence_id, length in enumerate(lengths):
        drafter.open(sequence_id, random_text(length, sequence_id))
        drafter.feed(sequence_id, 0, random_features(length - 1, sequence_id))


@pytest.mark.parametrize(
    "sizes",
    [[(1, 3)], [(2, 5)], [(4, 7)], [(3, 30)], [(6, 12)], [(4, 7), (1, 8), (6, 40), (3, 4)]],
    ids=str,
)
def test_the_same_trees_in_one_call(
    pair: tuple[AutoregressiveDrafter, AutoregressiveDrafter], sizes: list[tuple[int, int]]
) -> None:
    lengths = [12, 3, 30, 7][: len(sizes)]
    requests = [DraftRequest(i, depth, max_nodes) for i, (depth, max_nodes) in enumerate(sizes)]
    outcomes = [OutcomeRequest(i, 2, 4, 40) for i in range(len(sizes))]
    found = []
    for drafter in pair:
        begin(drafter, lengths)
        rounds = []
        for number in range(3):
            rounds.append(drafter.draft(requests))
            rounds.append(drafter.draft_outcomes(outcomes))
            if number == 1:  # once more from the same tokens
                rounds.append(drafter.draft(requests))
            for i, length in enumerate(lengths):
                have = length + 2 * number
                drafter.extend(i, have, random_text(2, 100 + number))
                # The newest token's feature is the one before it.
                drafter.feed(i, have - 1, random_features(2, 200 + number))
        found.append(rounds)
    assert found[0] == found[1]
    assert all(entry is not None and len(entry.tokens) for entries in found[0] for entry in entries)


def test_the_same_texts_of_sequences_that_come_and_go(
    pair: tuple[AutoregressiveDrafter, AutoregressiveDrafter],
) -> None:
    found = []
    for drafter in pair:
        begin(drafter, [9, 21])
        entries = drafter.draft([DraftRequest(0, 3, 9)])
        entries += drafter.draft([DraftRequest(1, 3, 9), DraftRequest(0, 5, 9)])
        drafter.close(0)
        begin(drafter, [14])
        found.append(entries + drafter.draft([DraftRequest(0, 2, 6), DraftRequest(1, 4, 6)]))
    assert found[0] == found[1]


def test_a_slot_grows_with_its_trees(
    pair: tuple[AutoregressiveDrafter, AutoregressiveDrafter],
) -> None:
    found = []
    for drafter in pair:
        begin(drafter, [4])
        capacity = drafter._sequences[0].slot.capacity
        found.append(drafter.draft([DraftRequest(0, 16, 128)]))  # 15 passes of eight rows
        assert drafter._sequences[0].slot.capacity > capacity
    assert found[0] == found[1]


def test_requests_of_other_kinds_in_the_batch_take_the_passes(load: Load) -> None:
    drafter, alone = load(), load()
    for each in (drafter, alone):
        begin(each, [10, 11, 12])
    coupled = SamplingParams(0.8, seed=3)
    requests = [DraftRequest(0, 4, 9), DraftRequest(1, 4, 9, coupled), DraftRequest(2, 4)]
    together, apart = drafter.draft(requests), [alone.draft([request])[0] for request in requests]
    for own, expected in zip(together, apart, strict=True):
        assert own is not None
        assert expected is not None
        # Log-probabilities beside coupled rows are torch's, which rounds the sum in another order.
        assert (own.tokens, own.parents) == (expected.tokens, expected.parents)
        assert own.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


def test_a_token_that_cannot_be_run_is_refused(load: Load) -> None:
    drafter = load()
    begin(drafter, [10])
    count = drafter._vocab
    drafter._draft_ids = torch.full((count,), 97)  # one behind the last embedding
    with pytest.raises(IndexError, match=r"not within 0\.\.96"):
        drafter.draft([DraftRequest(0, 3, 9)])
    drafter._draft_ids = torch.full((count,), -1)
    with pytest.raises(IndexError, match="drafted token"):
        drafter.draft([DraftRequest(0, 3, 9)])


def test_sizes_out_of_range_are_refused(load: Load) -> None:
    drafter = load()
    begin(drafter, [10])
    drafter.draft([DraftRequest(0, 2, 5)])
    state, layer = drafter._sequences[0], drafter._layer
    assert isinstance(layer, TreeGrower)
    assert state.stable is not None
    for depth, width, branch in ((0, 2, 2), (3, 0, 2), (3, 2, 0), (3, 2, 99)):
        wanted = TreeWanted(state.slot, 10, depth, width, branch, state.stable)
        with pytest.raises(IndexError, match="no tree is"):
            layer.grow([], [], [wanted], None)
    rows = state.slot.capacity
    wanted = TreeWanted(state.slot, 10, 1 + rows, 1, 2, state.stable)
    with pytest.raises(IndexError, match="do not fit their slot"):
        layer.grow([], [], [wanted], None)
    late = TreeWanted(state.slot, 1 << 20, 4, 2, 2, state.stable)
    with pytest.raises(IndexError, match="position"):
        layer.grow([], [], [late], None)


def test_a_draft_that_fails_leaves_no_tree_behind(load: Load) -> None:
    drafter = load()
    begin(drafter, [10])
    drafter.draft([DraftRequest(0, 5, 30)])
    good = drafter._draft_ids
    drafter._draft_ids = torch.full((drafter._vocab,), -1)
    with pytest.raises(IndexError):
        drafter.draft([DraftRequest(0, 3, 9)])
    drafter._draft_ids = good
    assert drafter.draft_outcomes([OutcomeRequest(0, 2, 4, 40)]) == [None]


def test_likelihoods_that_are_no_numbers_do_no_harm(load: Load) -> None:
    drafter = load()
    drafter.open(0, random_text(10, 0))
    drafter.feed(0, 0, torch.full((9, 64), torch.nan, dtype=torch.bfloat16))
    (entry,) = drafter.draft([DraftRequest(0, 4, 9)])
    assert entry is None or all(0 <= token < 97 for token in entry.tokens)
