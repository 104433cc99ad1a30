"""The hop experiment on real processes, briefly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(120)
def test_rounds_go_both_ways_and_leave_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.hop", "--sequences", "2", "--rounds", "8", "--turns", "1"]
    run = subprocess.run(
        [*command, "--json", str(tmp_path / "hop.json")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (row,) = json.loads((tmp_path / "hop.json").read_text())["results"]
    assert row["sequences"] == 2
    # Both ways cross processes, and the longer way crosses one more.
    assert 100 < row["direct"]["median_us"] < row["conductor"]["median_us"]
    assert row["hop_us"] == pytest.approx(row["conductor"]["median_us"] - row["direct"]["median_us"])
