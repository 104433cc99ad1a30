"""The equality report: decoding on the engine itself, and how differences are found and counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.equality.__main__ import markdown
from experiments.equality.comparison import Difference, differences
from experiments.equality.decoding import DraftShape, Text, decode
from paceline.methods.loading import load_drafter
from paceline.sampling.params import SamplingParams
from paceline.target import TargetEngine
from tests.methods.conftest import (  # noqa: F401  fixtures
    deepseek_mtp3_dir,
    deepseek_mtp_dir,
    dflash_dir,
    dflash_tensors,
    drafter_dirs,
    dspark_dir,
    eagle1_dir,
    eagle1_tensors,
    eagle2_dir,
    eagle3_dir,
    eagle3_tensors,
    gemma4_mtp_dir,
    independent_dir,
    medusa1_dir,
    p_eagle_dir,
    p_eagle_tensors,
    pard1_dir,
    pard2_dir,
    pard_model_dir,
    target_dir,
)

PROMPTS = [[5, 9, 17, 3], [40, 41], list(range(10, 33))]
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=4),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5),
]


@pytest.mark.parametrize(
    "method",
    [
        "deepseek_mtp",
        "deepseek_mtp3",
        "dflash",
        "dspark",
        "eagle1",
        "eagle2",
        "eagle3",
        "gemma4_mtp",
        "independent",
        "medusa1",
        "p_eagle",
        "pard1",
        "pard2",
    ],
)
def test_drafts_and_company_leave_texts_alone(
    target_dir: Path,  # noqa: F811
    drafter_dirs: dict[str, Path],  # noqa: F811
    method: str,
) -> None:
    drafter = load_drafter(drafter_dirs[method], target_dir, dtype=torch.float32)
    taps = [] if drafter.tap is None else [drafter.tap]
    engine = TargetEngine.load(target_dir, dtype=torch.float32, taps=taps)
    alone = [
        decode(engine, [prompt], [sampling], 20)[0]
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    for shape in (DraftShape(1, 1), DraftShape(4, 4), DraftShape(4, 10)):
        drafted = decode(engine, PROMPTS, SAMPLINGS, 20, drafter, shape)
        assert [text.tokens for text in drafted] == [text.tokens for text in alone]
        assert all(len(text.gaps) == 20 for text in drafted)
    torch.testing.assert_close(drafted[1].gaps, alone[1].gaps, rtol=1e-3, atol=1e-3)
    assert engine.cache.num_slots == 0


def test_the_first_difference_counts_and_ties_are_told_apart() -> None:
    plain = [Text(tokens=[1, 2, 3], gaps=[1.0, 5e-5, 2.0]), Text(tokens=[4, 5], gaps=[1.0, 1.0])]
    other = [Text(tokens=[1, 9, 9]), Text(tokens=[4, 5])]
    assert differences(plain, other) == [Difference(prompt=0, place=1, gap=5e-5)]
    assert differences(plain, other)[0].is_tie
    assert not differences(plain, plain)


def test_the_table_counts_over_sampling_and_names_the_earliest() -> None:
    cell = {"compared": "chain", "num_texts": 3, "num_equal": 2, "num_ties": 1}
    found = {"prompt": 1, "place": 7, "gap": 2e-5}
    report = {
        "configurations": [
            {
                "configuration": "float32, lean",
                "plain_step_ms": 1.25,
                "drafted_step_ms": 2.0,
                "cells": [
                    {**cell, "sampling": "greedy", "differences": [found]},
                    {**cell, "num_equal": 3, "num_ties": 0, "sampling": "coupled", "differences": []},
                ],
            }
        ]
    }
    assert markdown(report).splitlines()[-1] == (
        "| float32, lean | 5 of 6 (1 tied) | token 7, gap 2e-05 | 1.2 | 2.0 |"
    )
