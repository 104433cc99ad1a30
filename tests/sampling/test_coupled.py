"""Greedy and coupled verification: one text whatever was drafted, and exactly the target's law."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft_tree import DraftTree
from paceline.sampling.batch import verify_step
from paceline.sampling.choices import _race_filtered, _race_whole, target_choices
from paceline.sampling.noise import NoiseRole, _gumbel_of, gumbel
from paceline.sampling.params import SamplingParams
from paceline.sampling.row_params import RowParams
from tests.sampling.toy import Prefix, ToyModel

PROMPT: Prefix = (0, 1)


def plain_text(model: ToyModel, params: SamplingParams, length: int) -> Prefix:
    """Decoding one token at a time."""
    text = PROMPT
    while len(text) < length:
        verdict = verify_step(model.logits(text)[None], [DraftTree()], [len(text)], [params])[0]
        text = (*text, verdict.final_token)
    return text


def plain_texts(model: ToyModel, params: list[SamplingParams], length: int) -> list[Prefix]:
    """The same for many sequences stepping together."""
    texts = [PROMPT] * len(params)
    for position in range(len(PROMPT), length):
        logits = torch.stack([model.logits(text) for text in texts])
        verdicts = verify_step(logits, [DraftTree()] * len(texts), [position] * len(texts), params)
        texts = [(*text, verdict.final_token) for text, verdict in zip(texts, verdicts, strict=True)]
    return texts


def random_tree(rng: random.Random, vocab: int) -> DraftTree:
    """A tree of up to seven nodes whose siblings differ."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    for _ in range(rng.randrange(8)):
        parent = rng.randrange(-1, len(tokens))
        token = rng.randrange(vocab)
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return DraftTree(
        tuple(tokens), tuple(parents), tuple(depths), (0.5,) * len(tokens), (None,) * len(tokens)
    )


def rows_of(model: ToyModel, text: Prefix, tree: DraftTree) -> list[torch.Tensor]:
    """Logits of the root row and of every node's row."""
    paths: list[Prefix] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else text), token))
    return [model.logits(path) for path in (text, *paths)]


parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 2]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 2**64 - 1),
)


@given(st.lists(parameters, min_size=1, max_size=4), st.integers(0, 10**6), st.sampled_from([1, 2, 5, 64]))
@settings(max_examples=100, deadline=None)
def test_the_text_does_not_depend_on_drafts_or_on_the_batch(
    params: list[SamplingParams], seed: int, num_threads: int
) -> None:
    """Several sequences step together over random trees; each text equals plain decoding of that sequence alone.

    Whatever the number of threads, which may look at rows further down.
    """
    rng = random.Random(seed)
    models = [ToyModel(seed + index, 4, 0.2) for index in range(len(params))]
    texts = [PROMPT] * len(params)
    for _ in range(3):
        trees = [random_tree(rng, 4) for _ in texts]
        logits = torch.stack(
            [
                row
                for model, text, tree in zip(models, texts, trees, strict=True)
                for row in rows_of(model, text, tree)
            ]
        )
        with mock.patch("paceline.sampling.batch._num_threads", return_value=num_threads):
            verdicts = verify_step(logits, trees, [len(text) for text in texts], params)
        texts = [(*text, *verdict.committed_tokens) for text, verdict in zip(texts, verdicts, strict=True)]
    for model, text, param in zip(models, texts, params, strict=True):
        assert text == plain_text(model, param, len(text))


def test_greedy_is_the_argmax_of_every_prefix() -> None:
    model = ToyModel(5, 4)
    text = plain_text(model, SamplingParams(temperature=0), 12)
    for length in range(len(PROMPT), 12):
        assert text[length] == int(model.probs(text[:length]).argmax())


@pytest.mark.parametrize("seed", range(4))
def test_the_race_has_the_targets_law_on_a_grid(seed: int) -> None:
    """All triples of 96 evenly spaced noise words: the winner's frequencies approach the law as 1 / 96.

    The exact race, P(x wins) = p(x), is the integral this sum approximates; the midpoint rule's error comes from the
    grid cells on the boundary between winners.
    """
    probs = ToyModel(seed, 3).probs(())
    steps = 96
    words = torch.tensor([int((index + 0.5) * 2**32 / steps) for index in range(steps)])
    noise = _gumbel_of(torch.cartesian_prod(words, words, words), torch.float64)
    winners = (noise + probs.log()).argmax(dim=-1)
    frequencies = torch.bincount(winners, minlength=3) / steps**3
    assert float((frequencies - probs).abs().max()) < 1 / steps


def test_one_position_has_the_targets_law_over_seeds() -> None:
    """Chi-square, 200k keyed draws; bound at about 1e-6."""
    probs = ToyModel(11, 4).probs(())
    num_draws = 200_000
    rows = RowParams.build([SamplingParams(seed=99)], [num_draws])
    choices = target_choices(probs.log().float().expand(num_draws, 4), range(num_draws), rows)
    counts = torch.bincount(choices, minlength=4).double()
    statistic = float(((counts - num_draws * probs) ** 2 / (num_draws * probs)).sum())
    assert statistic < 30.7  # 3 degrees of freedom


def test_the_joint_law_over_seeds_is_the_targets_with_drafts() -> None:
    """Chi-square of three tokens over 4000 seeds, verified with a drafted chain; bound at about 1e-6."""
    model, drafter = ToyModel(41, 3), ToyModel(42, 3)
    params = [SamplingParams(seed=seed) for seed in range(4000)]
    drafts = plain_texts(drafter, params, 4)  # the drafter's own races on the same noise
    trees = [DraftTree(draft[2:], (-1, 0), (1, 2), (0.5, 0.5), (None, None)) for draft in drafts]
    logits = torch.stack([row for tree in trees for row in rows_of(model, PROMPT, tree)])
    verdicts = verify_step(logits, trees, [2] * len(params), params)
    counts: dict[Prefix, int] = defaultdict(int)
    num_accepted = 0
    for text, verdict in zip(plain_texts(model, params, 5), verdicts, strict=True):
        committed = (*PROMPT, *verdict.committed_tokens)
        assert committed == text[: len(committed)]
        num_accepted += len(verdict.accepted_tokens)
        counts[text[2:]] += 1
    assert num_accepted > len(params) // 2  # drafts took part
    num_seeds = len(params)
    statistic = 0.0
    for tail in itertools.product(range(3), repeat=3):
        prob = math.prod(float(model.fractions((*PROMPT, *tail[:i]))[tail[i]]) for i in range(3))
        statistic += (counts[tail] - num_seeds * prob) ** 2 / (num_seeds * prob)
    assert statistic < 74.5  # 26 degrees of freedom


@pytest.mark.parametrize("seed", range(3))
def test_drafter_and_target_agree_as_often_as_the_formula_says(seed: int) -> None:
    """P(match) = sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x)) (Daliri et al., arXiv 2408.07978)."""
    wanted, drawn = ToyModel(seed, 4).probs(()), ToyModel(seed + 9, 4).probs(())
    formula = sum(
        1 / sum(max(float(wanted[y] / wanted[x]), float(drawn[y] / drawn[x])) for y in range(4))
        for x in range(4)
    )
    num_draws = 100_000
    rows = RowParams.build([SamplingParams(seed=seed)], [num_draws])
    first = target_choices(wanted.log().float().expand(num_draws, 4), range(num_draws), rows)
    matches = first == target_choices(drawn.log().float().expand(num_draws, 4), range(num_draws), rows)
    error = math.sqrt(formula * (1 - formula) / num_draws)
    assert float(matches.double().mean()) == pytest.approx(formula, abs=5 * error)
    overlap = float(torch.minimum(wanted, drawn).sum())
    assert overlap / (2 - overlap) <= formula <= overlap


def test_the_short_race_is_the_whole_race() -> None:
    """Noise for the surviving ids only: the same winner as noise for all, also with tied logits."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(64, 4096, generator=generator) * 4).round()
    floor = logits.topk(20, dim=-1).values[:, -1:]
    processed = logits.masked_fill(logits < floor, -torch.inf)
    seeds, positions = torch.arange(64), torch.arange(64) * 3
    assert torch.equal(_race_filtered(processed, positions, seeds), _race_whole(processed, positions, seeds))


def test_a_row_chooses_the_same_alone_and_in_any_company() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 5000, generator=generator)
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=5),
        SamplingParams(temperature=0),
        SamplingParams(seed=3, temperature=0.6, top_p=0.5),
        SamplingParams(seed=2**64 - 1, min_p=0.5),
    ]
    positions = [4, 5, 6, 7, 2**35]
    together = target_choices(logits, positions, RowParams.build(params, [1] * 5))
    for index in range(5):
        rows = RowParams.build([params[index]], [1])
        assert together[index] == target_choices(logits[index : index + 1], [positions[index]], rows)[0]
    noise = gumbel(1, [4], NoiseRole.TARGET, 5000)
    assert int(together[0]) == int((logits[0].log_softmax(-1) + noise[0]).argmax())


def test_broken_logits_neither_crash_nor_leave_the_vocabulary() -> None:
    for value in (math.nan, -math.inf, math.inf):
        for params in (
            SamplingParams(),
            SamplingParams(top_k=2),
            SamplingParams(top_p=0.5),
            SamplingParams(temperature=0),
        ):
            verdict = verify_step(torch.full((1, 64), value), [DraftTree()], [3], [params])[0]
            assert 0 <= verdict.final_token < 64
