"""`paceline bench planner`: its figures, and that the comparison beside it is called as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from experiments.bench.command import bench
from experiments.planner.measure import Timing, random_steps, time_choices

QUICK = ["planner", "--sequences", "4", "--candidates", "5", "--rounds", "40"]


def test_the_figures_are_printed_as_json() -> None:
    done = CliRunner().invoke(bench, [*QUICK, "--json", "-"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["sequences"], report["candidates"], report["rounds"]) == (4, 5, 40)
    assert 0 < report["median_us"] <= report["p90_us"]
    assert report["median_us"] == max(mode["median_us"] for mode in report["modes"].values())
    assert set(report["modes"]) == {"full search", "early stop"}


def test_people_get_a_table_and_a_file(tmp_path: Path) -> None:
    done = CliRunner().invoke(bench, [*QUICK, "--json", str(tmp_path / "planner.json")])
    assert done.exit_code == 0, done.output
    assert "early stop" in done.stdout
    assert json.loads((tmp_path / "planner.json").read_text())["rounds"] == 40


def test_the_comparison_is_what_runs_without_a_name() -> None:
    context = get_command(bench).make_context("bench", ["--quick", "--json", "figures.json", "--rounds", "2"])
    assert context.invoked_subcommand is None
    assert not context.args
    assert context.params["quick"] is True
    assert context.params["json_path"] == Path("figures.json")
    assert context.params["rounds"] == 2
    assert CliRunner().invoke(bench, ["--prompts", "0"]).exit_code == 2


def test_steps_are_what_they_claim() -> None:
    steps = random_steps(3, 7)
    assert steps == random_steps(3, 7)
    for path_acceptances in (path_acceptances for step in steps for path_acceptances in step):
        assert len(path_acceptances) == 7
        assert list(path_acceptances) == sorted(path_acceptances, reverse=True)
        assert all(0 <= path_acceptance <= 1 for path_acceptance in path_acceptances)
    timing = time_choices(steps, 10, is_rejection=False)
    assert len(timing.samples_us) == 10
    assert 0 <= timing.num_chosen <= 21


def test_one_slow_choice_moves_no_median() -> None:
    timing = Timing((10.0, 11.0, 9.0, 5000.0, 10.0), 1.0)
    assert timing.median_us == 10
    assert timing.quantile_us(0.9) == pytest.approx(5000.0)
    assert timing.quantile_us(0.1) == pytest.approx(9.0)
