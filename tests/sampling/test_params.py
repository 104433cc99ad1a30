"""Sampling parameters: every refusal names its field."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from paceline.contract.errors import InvalidRequestError
from paceline.sampling.params import SamplingParams, VerifyMode


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", -1e-300),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("top_p", 0),
        ("top_p", 1.0001),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("seed", None),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10.5),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2.1),
        ("presence_penalty", -math.inf),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias[1]", ((1, 100.5),)),
        ("logit_bias[1]", ((1, math.nan),)),
        ("logit_bias[-1]", ((-1, 1.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((token, 1.0) for token in range(1025))),
        ("bad_runs[0].token_ids", ((),)),
        ("bad_runs[0].token_ids", ((1,) * 33,)),
        ("bad_runs", ((1,),) * 257),
        ("bad_runs[0].token_ids[0]", ((-1,),)),
        ("min_tokens", -1),
        ("min_tokens", 2.0),
        ("mode", "greedy"),
        ("mode", VerifyMode.GREEDY),
    ],
)
def test_out_of_range_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(**{field.partition("[")[0]: value})  # type: ignore[arg-type]
    assert raised.value.field == field
    assert str(raised.value).startswith(field)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"top_k": 0},
        {"top_k": 2**31 - 1},
        {"top_p": 1},
        {"top_p": 1e-12},
        {"min_p": 1},
        {"seed": 2**64 - 1},
        {"repetition_penalty": 1e-3},
        {"repetition_penalty": 10},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": tuple((token, -100.0) for token in range(1024))},
        {"bad_runs": ((2**31 - 1,) * 32,) * 256},
    ],
)
def test_values_at_the_edge_are_accepted(values: dict[str, float]) -> None:
    SamplingParams(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "has_rules"),
    [
        ({}, False),
        ({"temperature": 0.3, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 3}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": ((0, 1.0),)}, True),
        ({"bad_runs": ((0,),)}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_only_what_changes_logits_by_the_text_is_a_rule(values: dict[str, object], has_rules: bool) -> None:
    assert SamplingParams(**values).has_rules is has_rules  # type: ignore[arg-type]


def test_the_mode_follows_the_temperature() -> None:
    assert SamplingParams().resolved_mode is VerifyMode.COUPLED
    assert SamplingParams(temperature=0).resolved_mode is VerifyMode.GREEDY
    assert SamplingParams(temperature=0, mode=VerifyMode.REJECTION).resolved_mode is VerifyMode.GREEDY
    assert SamplingParams(mode=VerifyMode.REJECTION).resolved_mode is VerifyMode.REJECTION


def test_parameters_import_without_torch() -> None:
    """The gateway's image has no torch."""
    code = (
        "import sys; sys.modules['torch'] = None; "
        "from paceline.sampling.params import SamplingParams; SamplingParams()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
