"""Sampling parameters from the wire: documented defaults, every field carried over, vocabularies checked."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.contract.errors import InvalidRequestError
from paceline.sampling.params import SamplingParams
from paceline.v1 import sampling_pb2
from services.runtime.sampling import log_prob_counts, sampling_params


def test_an_empty_message_has_the_documented_defaults() -> None:
    assert sampling_params(sampling_pb2.SamplingParams()) == SamplingParams(temperature=0.0)


def test_every_field_is_carried_over() -> None:
    message = sampling_pb2.SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.125,
        seed=9,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={9: 1.0, 4: -2.0},
        bad_runs=[{"token_ids": [1, 2]}, {"token_ids": [3]}],
        min_tokens=7,
    )
    assert sampling_params(message) == SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.125,
        seed=9,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((4, -2.0), (9, 1.0)),
        bad_runs=((1, 2), (3,)),
        min_tokens=7,
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {3: 1.0, 10: 1.0}}, "sampling.logit_bias[10]"),
        ({"bad_runs": [{"token_ids": [3]}, {"token_ids": [1, 10]}]}, "sampling.bad_runs[1].token_ids[1]"),
        ({"bad_runs": [{"token_ids": [token]} for token in range(10)]}, "sampling.bad_runs"),
    ],
)
def test_tokens_are_compared_with_the_vocabulary(fields: dict[str, Any], field: str) -> None:
    message = sampling_pb2.SamplingParams(**fields)
    with pytest.raises(InvalidRequestError) as caught:
        sampling_params(message, 10)
    assert caught.value.field == field
    sampling_params(message, 11)


def test_log_prob_options() -> None:
    options = sampling_pb2.LogProbOptions
    assert log_prob_counts(options(), 100) == (None, None)
    assert log_prob_counts(options(num_top=0, num_prompt_top=20), 100) == (0, 20)
    for bad, field in ((options(num_top=21), "num_top"), (options(num_prompt_top=21), "num_prompt_top")):
        with pytest.raises(InvalidRequestError) as caught:
            log_prob_counts(bad, 100)
        assert caught.value.field == f"log_probs.{field}"
    with pytest.raises(InvalidRequestError):
        log_prob_counts(options(num_top=8), 7)  # more than there are
