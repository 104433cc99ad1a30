"""Every parameter on real processes: plain and speculated give the same tokens and log-probabilities."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.client import Completion, TokenLogProb
from tests.integration.conftest import Site

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NUM_TOKENS = 24
TOLERANCE = 1e-4
BASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": NUM_TOKENS},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 1234, "max_tokens": NUM_TOKENS},
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0},
    "bias": {"logit_bias": {28: -100.0, 30: 3.0}},  # "," and "." of the tokenizer
    "bad_words": {"bad_words": [" the", "is", " of"]},
    "min_tokens": {"min_tokens": 16, "stop_token_ids": [28, 30]},
    "stop": {"stop": ["ed ", " a"]},
    "filters": {"top_k": 2, "min_p": 0.1},
    "everything": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {28: 1.0},
        "bad_words": [" and"],
        "min_tokens": 8,
    },
}


def values(entries: tuple[TokenLogProb, ...]) -> list[float]:
    return [value for entry in entries for value in (entry.log_prob, *(other for _, other in entry.top))]


def assert_same(left: Completion, right: Completion) -> None:
    assert left.token_ids == right.token_ids
    assert (left.text, left.finish_reason) == (right.text, right.finish_reason)
    assert [entry.token_id for entry in left.log_probs] == list(left.token_ids)
    assert [entry.token_id for entry in right.log_probs] == list(right.token_ids)
    assert values(left.log_probs) == pytest.approx(values(right.log_probs), abs=TOLERANCE)
    assert values(left.prompt_log_probs) == pytest.approx(values(right.prompt_log_probs), abs=TOLERANCE)


def both_ways(site: Site, prompts: list[str], **parameters: Any) -> tuple[list[Completion], list[Completion]]:
    """Plain decoding one at a time, and with drafts all at once."""
    plain = [site.complete(prompt, speculation=False, **parameters) for prompt in prompts]
    return plain, site.complete_all(prompts, **parameters)


@pytest.mark.parametrize("base", BASES)
def test_each_parameter_plain_and_speculated(together: Site, prompts: list[str], base: str) -> None:
    chosen = prompts[:2]
    unchanged = [together.complete(prompt, **BASES[base]).token_ids for prompt in chosen]
    num_accepted = 0
    for name, parameters in PARAMETERS.items():
        asked = {**BASES[base], **parameters, "log_probs": 3}
        plain, drafted = both_ways(together, chosen, **asked)
        for left, right in zip(plain, drafted, strict=True):
            assert_same(left, right)
        num_accepted += sum(completion.stats.num_accepted_tokens for completion in drafted)
        texts = [completion.token_ids for completion in plain]
        if not (base == "greedy" and name == "filters"):  # the likeliest token passes every filter
            assert texts != unchanged, name
        if name == "bad_words":
            assert not any(word in completion.text for completion in plain for word in (" the ", " of "))
        if name == "min_tokens":
            assert all(len(tokens) > 16 for tokens in texts)
    assert num_accepted > 0


@pytest.mark.parametrize("base", BASES)
def test_choices_are_the_texts_of_their_seeds(together: Site, prompts: list[str], base: str) -> None:
    parameters = {**BASES[base], "log_probs": 1, "prompt_log_probs": 0}
    turn = [{"role": "user", "content": prompts[4]}]
    choices = together.client.complete_many(turn, 3, **parameters)
    assert [bool(choice.prompt_log_probs) for choice in choices] == [True, False, False]
    for index, choice in enumerate(choices):
        seed = choice.seed
        alone = together.client.complete(
            turn, **{**BASES[base], "seed": seed, "log_probs": 1, "speculation": False}
        )
        assert alone.token_ids == choice.token_ids
        assert values(alone.log_probs) == pytest.approx(values(choice.log_probs), abs=TOLERANCE)
        if base == "sampled":
            assert seed == 1234 + index
    assert len({choice.token_ids for choice in choices}) == (1 if base == "greedy" else 3)


def test_log_probs_have_no_gap_where_the_verifier_was_lost(together: Site, prompts: list[str]) -> None:
    parameters = {
        **BASES["sampled"],
        "max_tokens": 48,
        "log_probs": 2,
        "prompt_log_probs": 1,
        "frequency_penalty": 0.5,
        "bad_words": [" the"],
    }
    expected = together.complete(prompts[2], speculation=False, **parameters)
    stream = together.client.generate([{"role": "user", "content": prompts[2]}], **parameters)
    events = [next(stream) for _ in range(3)]  # started, the prompt's, the first tokens
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: list(stream))
        together.deployment.kill("verifier")
        together.deployment.restart("verifier")
        events += rest.result(timeout=120)
    assert_same(Completion.from_events(events), expected)
