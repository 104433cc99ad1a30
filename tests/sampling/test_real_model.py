"""The law of what is committed, with the real target and the shipped drafter: chi-square over thousands of seeds.

The models run once for each text that matters; then every mode verifies thousands of drafts, drawn as the drafter draws
them, and the first two committed tokens are held against the target's own joint distribution.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from paceline.draft_tree import DraftTree
from paceline.drafts import DrawRule, SiblingDraws
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.methods.loading import default_drafter, drafter_tap, load_drafter
from paceline.models import DEFAULT_MODEL, cached
from paceline.sampling.batch import verify_step
from paceline.sampling.distribution import DraftDistribution
from paceline.sampling.draws import draw_children
from paceline.sampling.noise import NoiseRole, gumbel_at, seed_tensor
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.probabilities import target_probs
from paceline.sampling.row_params import RowParams
from paceline.target import SequenceRows, TargetEngine
from tests.sampling.chi_square import path_acceptance

PROMPT = [
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    2,
    198,
    1,
    4093,
    198,
    19556,
    2,
    198,
    1,
    520,
    9531,
    198,
]
"""Some ids around the chat template's header; what they say does not matter."""

TEMPERATURE, TOP_K = 1.0, 8
NUM_SEEDS = 3000


@dataclass
class Facts:
    """What both models say after the prompt and after every first token that matters, over a few token ids.

    Tokens outside the target's and the drafter's eight likeliest have probability zero under either, so that leaving
    them out changes no decision; ids are places in `ids`.
    """

    ids: list[int]
    root: torch.Tensor  # [len(ids)] float32: the target's logits after the prompt
    after: dict[int, torch.Tensor]  # the same after each first token
    first: DraftDistribution  # the drafter's after the prompt
    second: dict[int, DraftDistribution]  # and after each token that it may draw

    @cached_property
    def joint(self) -> dict[tuple[int, int], float]:
        """The target's law of two tokens."""
        params = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K)

        def probs(logits: torch.Tensor) -> list[float]:
            return target_probs(logits[None], RowParams.build([params], [1]))[0].tolist()

        return {
            (one, two): p * q
            for one, p in enumerate(probs(self.root))
            if p > 0
            for two, q in enumerate(probs(self.after[one]))
            if q > 0
        }


@pytest.fixture(scope="module")
def facts() -> Facts:
    directory = cached(DEFAULT_MODEL)
    if directory is None:
        pytest.skip("the default model is not cached: `paceline models fetch smollm2-135m`")
    torch.set_num_threads(1)
    tap = drafter_tap(default_drafter(DEFAULT_MODEL))
    assert tap is not None
    engine = TargetEngine.load(directory, "cpu", torch.float32, taps=[tap])
    drafter = load_drafter(default_drafter(DEFAULT_MODEL), directory, dtype=torch.float32)
    with torch.inference_mode():
        slot = engine.open(len(PROMPT) + 64)
        output = engine.step([SequenceRows(slot, PROMPT, num_logits="last")])
        engine.keep(slot, range(len(PROMPT)))
        root = output.logits[0][-1]
        first, second = drafted(drafter, output.features[0])
        firsts = sorted({*root.topk(TOP_K).indices.tolist(), *first.token_ids.tolist()})
        fan = SequenceRows(slot, firsts, parents=[-1] * len(firsts))
        rows = dict(zip(firsts, engine.step([fan]).logits[0], strict=True))
        kept = {*firsts}
        for row in rows.values():
            kept.update(row.topk(TOP_K).indices.tolist())
        for dist in second.values():
            kept.update(dist.token_ids.tolist())
    ids = sorted(kept)
    place = {token: index for index, token in enumerate(ids)}

    def local(dist: DraftDistribution) -> DraftDistribution:
        assert dist.weights is not None
        places = torch.tensor([place[token] for token in dist.token_ids.tolist()])
        return DraftDistribution.of_weights(places, dist.weights)

    return Facts(
        ids=ids,
        root=root[ids].clone(),
        after={place[token]: row[ids].clone() for token, row in rows.items()},
        first=local(first),
        second={place[token]: local(dist) for token, dist in second.items()},
    )


def drafted(
    drafter: Drafter, features: torch.Tensor
) -> tuple[DraftDistribution, dict[int, DraftDistribution]]:
    """The distributions that the drafter draws from, by drafting with other seeds until every first token came."""
    first, second = None, {}
    for seed in range(2000):
        params = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=seed, mode=VerifyMode.REJECTION)
        drafter.open(1, PROMPT)
        drafter.feed(1, 0, features[:-1])
        (entry,) = drafter.draft([DraftRequest(1, 2, 2, params)])
        assert entry is not None
        assert entry.draft_dists is not None
        one, two = entry.draft_dists
        assert one is not None
        assert two is not None
        assert isinstance(one.distribution, DraftDistribution)
        assert isinstance(two.distribution, DraftDistribution)
        first = one.distribution
        second[entry.tokens[0]] = two.distribution
        if len(second) == first.token_ids.numel():
            return first, second
    raise AssertionError(f"only {len(second)} of the first tokens came up")


def draft(facts: Facts, params: SamplingParams, rule: DrawRule, count: int) -> DraftTree:
    """Two positions as the drafter drafts them: the second goes on from the first's first draw."""
    start = len(PROMPT)
    if rule is DrawRule.TOP:
        best = facts.first.token_ids.tolist()[:count]
        below = facts.second[best[0]].token_ids.tolist()[:count]
        draws: tuple[SiblingDraws | None, ...] = (None,) * (2 * count)
    else:
        one = draw_children(facts.first, rule, count, params, start, start)
        two = draw_children(facts.second[one.tokens[0]], rule, count, params, start, start + 1)
        best, below = list(one.tokens), list(two.tokens)
        draws = (one,) * len(best) + (two,) * len(below)
    return DraftTree(
        (*best, *below),
        (-1,) * len(best) + (0,) * len(below),
        (1,) * len(best) + (2,) * len(below),
        (1.0,) * (len(best) + len(below)),
        draws,
    )


def coupled_drafts(facts: Facts, seeds: range) -> list[DraftTree]:
    """For every seed the winners of the drafter's own races on the target's noise."""

    def race(dist: DraftDistribution, some: list[int], position: int) -> list[int]:
        ids = dist.token_ids.expand(len(some), -1)
        noise = gumbel_at(seed_tensor(some), [position] * len(some), NoiseRole.TARGET, ids)
        winners = (noise + dist.probs.log()).argmax(dim=-1)
        return dist.token_ids[winners].tolist()

    firsts = dict(zip(seeds, race(facts.first, list(seeds), len(PROMPT)), strict=True))
    seconds: dict[int, int] = {}
    for token, dist in facts.second.items():
        some = [seed for seed in seeds if firsts[seed] == token]
        seconds.update(zip(some, race(dist, some, len(PROMPT) + 1), strict=True))
    chain = ((-1, 0), (1, 2), (1.0, 1.0), (None, None))
    return [DraftTree((firsts[seed], seconds[seed]), *chain) for seed in seeds]


ARMS = [
    (VerifyMode.COUPLED, DrawRule.TOP, 1),
    (VerifyMode.REJECTION, DrawRule.WITHOUT_REPLACEMENT, 1),
    (VerifyMode.REJECTION, DrawRule.WITHOUT_REPLACEMENT, 3),
    (VerifyMode.REJECTION, DrawRule.WITH_REPLACEMENT, 3),
    (VerifyMode.REJECTION, DrawRule.TOP, 3),
    (VerifyMode.BLOCK, DrawRule.WITHOUT_REPLACEMENT, 1),
    (VerifyMode.BLOCK, DrawRule.TOP, 1),
    (VerifyMode.TYPICAL, DrawRule.TOP, 3),
]


@pytest.mark.parametrize(("mode", "rule", "count"), ARMS)
def test_two_tokens_have_the_targets_law(facts: Facts, mode: VerifyMode, rule: DrawRule, count: int) -> None:
    """Pearson's chi-square over the joint law; typical acceptance, which is not exact, must fail it."""
    start, seeds = len(PROMPT), range(NUM_SEEDS)
    params = [SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=seed, mode=mode) for seed in seeds]
    if mode is VerifyMode.COUPLED:
        trees = coupled_drafts(facts, seeds)
    else:
        trees = [draft(facts, param, rule, count) for param in params]
    dead = torch.zeros(len(facts.ids))  # behind two tokens nothing is looked at
    rows = []
    for tree in trees:
        nodes = zip(tree.tokens, tree.depths, strict=True)
        rows += [facts.root, *(facts.after[token] if depth == 1 else dead for token, depth in nodes)]
    verdicts = verify_step(torch.stack(rows), trees, [start] * NUM_SEEDS, params)
    texts = [verdict.committed_tokens for verdict in verdicts]
    short = [index for index, text in enumerate(texts) if len(text) == 1]
    if short:
        plain = verify_step(
            torch.stack([facts.after[texts[index][0]] for index in short]),
            [DraftTree()] * len(short),
            [start + 1] * len(short),
            [params[index] for index in short],
        )
        for index, verdict in zip(short, plain, strict=True):
            texts[index] = (*texts[index], verdict.final_token)
    assert sum(len(verdict.accepted_tokens) for verdict in verdicts) > NUM_SEEDS / 4  # drafts took part
    counts = Counter((text[0], text[1]) for text in texts)
    expected = {pair: prob * NUM_SEEDS for pair, prob in facts.joint.items()}
    assert (path_acceptance(counts, expected) > 1e-4) == mode.is_exact
