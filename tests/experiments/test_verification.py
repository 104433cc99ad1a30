"""The measurement of verification: its drafts are what it says, and a whole run on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from experiments.verification.cases import CASES, Case, Drafts, make_work
from experiments.verification.command import bench_verification
from experiments.verification.measure import Measured, Samples
from paceline.models import cached
from paceline.sampling.rows import maxima_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_drafts_are_accepted_wherever_the_mode_allows(case: Case) -> None:
    logits = torch.randn(3 * 5, 4096, generator=torch.Generator().manual_seed(1)) * 3
    work = make_work(case, logits, None, 3, Drafts(4, 4))
    accepted = work.run()
    assert make_work(case, logits, maxima_of(logits), 3, Drafts(4, 4)).run() == accepted
    assert accepted == work.run()
    if "rejection" in case.name:
        assert 0 <= accepted <= 12
    else:
        assert accepted == 12


@pytest.mark.parametrize("num_right", [0, 1, 3])
@pytest.mark.parametrize("case", CASES[:7], ids=lambda case: case.name)
def test_drafts_are_accepted_as_far_as_they_are_right(case: Case, num_right: int) -> None:
    logits = torch.randn(3 * 5, 4096, generator=torch.Generator().manual_seed(1)) * 3
    assert make_work(case, logits, None, 3, Drafts(4, num_right)).run() == 3 * num_right


def test_every_sequence_has_its_own_seed() -> None:
    params = CASES[3].seeded(4)
    assert [param.seed for param in params] == [0, 1, 2, 3]
    assert {param.top_k for param in params} == {50}


def test_a_share_is_of_step_and_verification_together() -> None:
    measured = Measured(1, 5, Samples([900.0, 950.0, 850.0]), {"greedy": Samples([100.0, 90.0, 110.0])})
    assert measured.share("greedy") == pytest.approx(0.1)
    assert measured.step.summary()["median_us"] == 900
    assert Samples([5.0]).summary()["p90_us"] == 5


@pytest.mark.skipif(cached("smollm2-135m") is None, reason="run `paceline models fetch smollm2-135m` first")
def test_a_small_run_writes_every_figure(tmp_path: Path) -> None:
    """On the real model."""
    app = typer.Typer()
    app.command()(bench_verification)
    found = tmp_path / "verification.json"
    options = ["--models", "smollm2-135m", "--sequences", "1,2", "--rounds", "2", "--draft-length", "1"]
    done = CliRunner().invoke(app, ["--json", str(found), "--threads", "1", *options])
    assert done.exit_code == 0, done.output
    (model,) = json.loads(found.read_text())["models"]
    assert model["vocab_size"] == 49_152
    assert [batch["rows"] for batch in model["batches"]] == [2, 4]
    for batch in model["batches"]:
        assert set(batch["verify"]) == {case.name for case in CASES}
        assert batch["step"]["median_us"] > 0
