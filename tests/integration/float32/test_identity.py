"""The text depends on target and seed alone: plain, co-located and separate give the same tokens in fp32."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.client import Completion
from tests.integration.conftest import Site, until_drafted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NUM_TOKENS = 16
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1234, "max_tokens": NUM_TOKENS}


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module", params=["greedy", "sampled"])
def sampling(request: pytest.FixtureRequest) -> dict[str, Any]:
    return GREEDY if request.param == "greedy" else SAMPLED


@pytest.fixture(scope="module")
def plain(together: Site, prompts: list[str], sampling: dict[str, Any]) -> list[tuple[int, ...]]:
    """Plain decoding, one sequence at a time."""
    return [together.complete(prompt, speculation=False, **sampling).token_ids for prompt in prompts]


def test_eight_plain_sequences_together(
    together: Site, prompts: list[str], sampling: dict[str, Any], plain: Any
) -> None:
    assert tokens(together.complete_all(prompts, speculation=False, **sampling)) == plain


def test_colocated_alone_and_eight_together(
    together: Site, prompts: list[str], sampling: dict[str, Any], plain: Any
) -> None:
    alone = [together.complete(prompt, **sampling) for prompt in prompts[::2]]  # the others: below, apart
    assert tokens(alone) == plain[::2]
    assert sum(completion.stats.num_accepted_tokens for completion in alone) > 0
    assert tokens(together.complete_all(prompts, **sampling)) == plain


def test_separate_alone_and_eight_together(
    apart: Site, prompts: list[str], sampling: dict[str, Any], plain: Any
) -> None:
    alone = [apart.complete(prompt, **sampling) for prompt in prompts[1::2]]
    assert tokens(alone) == plain[1::2]
    assert sum(completion.stats.num_accepted_tokens for completion in alone) > 0
    assert tokens(apart.complete_all(prompts, **sampling)) == plain


def test_the_drafter_killed_in_the_middle(
    apart: Site, prompts: list[str], sampling: dict[str, Any], plain: Any
) -> None:
    stream = apart.client.generate([{"role": "user", "content": prompts[0]}], **sampling)
    events = [next(stream), next(stream)]  # started, and the first tokens
    apart.deployment.kill("drafter")
    rest = apart.complete_all(prompts[1:], **sampling)
    first = Completion.from_events([*events, *stream])
    assert tokens([first, *rest]) == plain
    apart.deployment.restart("drafter")
    again = until_drafted(apart, prompts[1], **sampling)
    assert again.token_ids == plain[1]
