"""Drafting past outcomes: the right tokens behind each, whole paths, disjoint shares, and room for what comes next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline.drafts import DraftEntry
from paceline.methods.drafter import Drafter, DraftRequest, OutcomeRequest
from paceline.methods.tree import ROOT, GrowingTree
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.trie import DraftTrie
from tests.methods.conftest import VOCAB, Target, text
from tests.methods.eagle_reference import ReferenceEagle1
from tests.methods.test_eagle1 import likeliest as eagle1_chain
from tests.methods.test_eagle1 import reference  # noqa: F401  fixture
from tests.methods.test_eagle3 import reference_chain

Load = Callable[[Path], Drafter]
GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=1.0, seed=5)
LENGTH = 3


@pytest.fixture(params=["eagle1", "eagle2", "eagle3", "independent"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def drafter(method: str, load: Load, drafter_dirs: dict[str, Path]) -> Drafter:
    return load(drafter_dirs[method])


def start(drafter: Drafter, target: Target, sequence_id: int, tokens: list[int]) -> None:
    drafter.open(sequence_id, tokens)
    drafter.feed(sequence_id, 0, target.features(drafter, tokens)[:-1])


def draft(
    drafter: Drafter, sequence_id: int, sampling: SamplingParams = GREEDY, nodes: int = 5
) -> DraftEntry:
    (entry,) = drafter.draft([DraftRequest(sequence_id, LENGTH, nodes, sampling)])
    assert entry is not None
    return entry


def outcomes(
    drafter: Drafter,
    sequence_id: int,
    sampling: SamplingParams = GREEDY,
    *,
    count: int = 4,
    behind: int = 3,
    partition: int = 0,
    num_partitions: int = 1,
    may_continue: Callable[[], bool] = lambda: True,
) -> DraftEntry:
    request = OutcomeRequest(sequence_id, behind, count, 64, sampling, partition, num_partitions)
    (entry,) = drafter.draft_outcomes([request], may_continue)
    assert entry is not None
    entry.check(64, VOCAB)
    return entry


def paths(entry: DraftEntry) -> list[tuple[int, ...]]:
    """The tokens up to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(entry.tokens, entry.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def ends(sent: DraftEntry, entry: DraftEntry, behind: int = 3) -> list[tuple[int, ...]]:
    """The outcomes of an entry, paths of sent tokens and one that was not sent, with so many tokens behind them."""
    known, all_paths = {(), *paths(sent)}, paths(entry)
    deepest = {path[: len(path) - behind] for path in all_paths}
    return [path for path in all_paths if path not in known and path[:-1] in known and path in deepest]


def likeliest(
    method: str,
    w: dict[str, torch.Tensor],
    model_dir: Path,
    target: Target,
    tokens: list[int],
    forced: list[int],
    steps: int,
) -> list[int]:
    """What follows a path, everything computed anew: no cache, no tree, no batch."""
    if method == "eagle3":
        embedding = LlamaForCausalLM.from_pretrained(target._dir).get_input_embeddings().weight.detach()
        steps += len(forced)
        return reference_chain(w, embedding, target.taps(tokens), tokens, steps, forced)[len(forced) :]
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    out = [*tokens, *forced]
    with torch.inference_mode():
        for _ in range(steps):
            out.append(int(model(torch.tensor([out])).logits[0, -1].argmax()))
    return out[len(tokens) + len(forced) :]


def test_each_outcome_goes_on_as_the_drafter_would(
    method: str,
    drafter: Drafter,
    target: Target,
    eagle3_tensors: dict[str, torch.Tensor],
    reference: ReferenceEagle1,  # noqa: F811
    independent_dir: Path,
    target_dir: Path,
) -> None:
    tokens = text(9, seed=4)
    start(drafter, target, 1, tokens)
    sent = draft(drafter, 1)
    entry = outcomes(drafter, 1)
    assert entry.start == sent.start == len(tokens)
    all_paths = set(paths(entry))
    found = ends(sent, entry)
    assert len(found) == 4
    for path in found:
        if method in ("eagle1", "eagle2"):
            wanted = eagle1_chain(reference, target_dir, tokens, list(path), 3)
        else:
            wanted = likeliest(
                method, eagle3_tensors, independent_dir / "model", target, tokens, list(path), 3
            )
        assert all((*path, *wanted[:n]) in all_paths for n in (1, 2, 3)), path


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_a_hit_leaves_something_to_verify(drafter: Drafter, target: Target, sampling: SamplingParams) -> None:
    tokens = text(9, seed=4)
    start(drafter, target, 1, tokens)
    sent = draft(drafter, 1, sampling)
    entry = outcomes(drafter, 1, sampling)
    for path in ends(sent, entry):
        trie = DraftTrie(tokens, vocab_size=VOCAB)
        trie.add(sent)
        trie.add(entry)
        trie.commit(path)
        assert trie.max_depth >= 3, path


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_shares_are_disjoint_and_together_all(
    drafter: Drafter, target: Target, sampling: SamplingParams
) -> None:
    tokens = text(9, seed=4)
    found = []
    for partition, num_partitions in ((0, 1), (0, 3), (1, 3), (2, 3)):
        start(drafter, target, 1, tokens)
        sent = draft(drafter, 1, sampling)
        found.append(
            ends(
                sent,
                outcomes(drafter, 1, sampling, count=3, partition=partition, num_partitions=num_partitions),
            )
        )
    assert len(found[0]) == 3
    assert sorted(found[0]) == sorted(found[1] + found[2] + found[3])


def test_sequences_together_are_as_alone(drafter: Drafter, target: Target) -> None:
    texts = {i: text(7 + i, seed=i) for i in (1, 2, 3)}
    alone = {}
    for i, tokens in texts.items():
        start(drafter, target, i, tokens)
        draft(drafter, i)
        alone[i] = outcomes(drafter, i, behind=i)
        drafter.close(i)
    for i, tokens in texts.items():
        start(drafter, target, i, tokens)
    drafter.draft([DraftRequest(i, LENGTH, 5) for i in texts])
    together = drafter.draft_outcomes([OutcomeRequest(i, i, 4, 64) for i in texts])
    assert [(e.tokens, e.parents) for e in together if e] == [(e.tokens, e.parents) for e in alone.values()]


def test_it_breaks_off_with_what_there_is(drafter: Drafter, target: Target) -> None:
    tokens = text(9, seed=4)
    sizes = []
    for patience in (2, 3, 9):
        start(drafter, target, 1, tokens)
        draft(drafter, 1)
        looks = iter(range(99))
        sizes.append(len(outcomes(drafter, 1, may_continue=lambda n=patience, it=looks: next(it) < n).tokens))  # type: ignore[misc]
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    start(drafter, target, 1, tokens)
    sent = draft(drafter, 1)
    (nothing,) = drafter.draft_outcomes([OutcomeRequest(1, 3, 4, 64)], lambda: False)
    assert nothing is None or not ends(sent, nothing, 2)


def test_what_is_drafted_next_is_as_if_nothing_had_been_drafted_past(
    drafter: Drafter, target: Target
) -> None:
    tokens = text(9, seed=4)
    start(drafter, target, 1, tokens)
    sent = draft(drafter, 1)
    outcomes(drafter, 1)
    assert draft(drafter, 1).tokens == sent.tokens
    committed = [sent.tokens[0], (sent.tokens[0] + 1) % VOCAB]
    after = [*tokens, *committed]
    features = target.features(drafter, after)
    drafter.extend(1, len(tokens), committed)
    drafter.feed(1, len(tokens) - 1, features[len(tokens) - 1 : -1])
    start(drafter, target, 2, after)
    assert draft(drafter, 1).tokens == draft(drafter, 2).tokens
    assert outcomes(drafter, 1).tokens == outcomes(drafter, 2).tokens


def test_none_where_there_is_nothing_to_go_on_from(drafter: Drafter, target: Target) -> None:
    tokens = text(9, seed=4)
    start(drafter, target, 1, tokens)
    assert drafter.draft_outcomes([OutcomeRequest(1, 3, 4, 64)]) == [None]
    drawn = SamplingParams(temperature=1.0, seed=1, mode=VerifyMode.REJECTION)
    draft(drafter, 1, drawn)
    assert drafter.draft_outcomes([OutcomeRequest(1, 3, 4, 64, drawn)]) == [None]
    draft(drafter, 1)
    drafter.extend(1, len(tokens), [5])
    assert drafter.draft_outcomes([OutcomeRequest(1, 3, 4, 64)]) == [None]


def test_outcomes_are_ranked_by_the_whole_path() -> None:
    tree = GrowingTree()
    first = tree.propose([ROOT], [[-0.1, -2.5]], [[10, 11]])
    tree.run(first[:1])
    tree.propose(first[:1], [[-0.2, -2.0, -3.0]], [[20, 21, 22]])
    sent = tree.send(2)
    assert tree.entry(1, sent).tokens == (10, 20)
    assert tree.sent_not_run() == [2]
    assert tree.entry(1, [0, *tree.outcomes(2)]).tokens == (10, 21, 11)
    assert tree.outcomes(9, partition=1, num_partitions=2) == tree.outcomes(9)[1::2]
