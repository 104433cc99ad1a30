"""`experiments.modes`: the loop that measures is the verifier's, and its counts add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.decoding.arm import Arm
from experiments.decoding.generation import generate
from experiments.decoding.tally import Tally
from experiments.modes.arm import ARMS, GREEDY_ARMS
from experiments.modes.table import markdown
from paceline.methods.loading import drafter_tap, load_drafter
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.target import TargetEngine
from tests.methods.conftest import text

PROMPT = text(9, seed=8)


def run(
    target_dir: Path, drafter_dir: Path, arm: Arm, temperature: float, draft_length: int
) -> tuple[list[int], Tally]:
    """One generation of 24 tokens."""
    tap = drafter_tap(drafter_dir)
    engine = TargetEngine.load(target_dir, "cpu", torch.float32, taps=[] if tap is None else [tap])
    drafter = load_drafter(drafter_dir, target_dir, dtype=torch.float32)
    tally = Tally()
    tokens = generate(
        engine,
        drafter,
        PROMPT,
        arm,
        SamplingParams(temperature=temperature, seed=3, mode=arm.mode),
        draft_length=draft_length,
        max_nodes=2 * draft_length,
        max_tokens=24,
        stop_token_ids=frozenset(),
        watch=tally.add,
    )
    return tokens, tally


@pytest.mark.parametrize("arm", [*GREEDY_ARMS, *ARMS], ids=lambda arm: arm.name)
def test_every_arm_generates_and_adds_up(
    target_dir: Path, eagle3_dir: Path, independent_dir: Path, arm: Arm
) -> None:
    temperature = 0.0 if arm.mode is VerifyMode.GREEDY else 0.9
    texts = []
    for drafter_dir, draft_length in ((eagle3_dir, 4), (independent_dir, 2)):
        tokens, tally = run(target_dir, drafter_dir, arm, temperature, draft_length)
        texts.append(tokens)
        assert len(tokens) == tally.num_tokens == 24
        assert tally.num_tokens == tally.num_passes + sum(tally.accepted_at)
        assert tally.tokens_per_pass == 24 / tally.num_passes
        assert all(a <= d for a, d in zip(tally.accepted_at, tally.drafted_at, strict=True))
        assert max(len(tally.drafted_at), 1) <= draft_length
        is_drawn = arm.rule is not None and arm.rule.value != "top"
        assert (tally.bytes_per_token > 20) == is_drawn
    if arm.mode in (VerifyMode.GREEDY, VerifyMode.COUPLED):
        assert texts[0] == texts[1]  # whatever was drafted


def test_the_table_has_a_row_for_each_arm() -> None:
    rows = [
        {
            "arm": name,
            "exact": exact,
            "temperature": temperature,
            "tokens_per_pass": 2.0,
            "standard_error": 0.05,
            "acceptance_per_position": [0.5, 0.25],
            "bytes_per_token": 7.25,
        }
        for name, exact in (("coupled", True), ("typical", False))
        for temperature in (0.6, 1.0)
    ]
    lines = markdown({"command": "it", "results": rows}).splitlines()
    assert lines[0] == "`it`"
    assert lines[-1] == "| typical | no | 2.00 ± 0.05 | 2.00 ± 0.05 | 0.50 0.25 | 7.2 |"
    assert len(lines) == 6
