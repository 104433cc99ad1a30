"""Heads in clusters beside the dense one: with all clusters they are the same head, with fewer they agree less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.clusters import heads
from experiments.clusters.__main__ import markdown
from paceline.training.continuations import ContinueOptions, run
from tests.methods.gemma4_checkpoint import FOR_LLAMA, save_assistant
from tests.training.conftest import target_dir  # noqa: F401  a fixture


def test_all_clusters_are_the_dense_head(target_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    vocab = 259
    drafter = save_assistant(tmp_path / "drafter", target_dir, {**FOR_LLAMA, "vocab": vocab})
    run(
        ContinueOptions(
            target_dir, tmp_path / "text", rows=4, max_tokens=40, greedy_fraction=1.0, dtype="float32"
        )
    )
    assistant, tensors = heads.load(drafter, target_dir, torch.float32)
    rows = heads.rows_of(assistant, tmp_path / "text", 400, 30)
    assert rows.states.shape == (heads.CHAIN, 30, 24)
    dense, few, all_ = heads.compare(assistant, tensors, rows, [2, 7, 8], 7, [1, 3], 2)
    assert (dense.num_selected, few.num_selected, all_.num_selected) == (0, 2, 7)  # eight there are not
    assert dense.agreement == all_.agreement == 1.0
    assert few.agreement < 1.0
    assert all_.mean_accepted == dense.mean_accepted
    seen = rows.states.flatten(0, 1)
    _, fitted, whole = heads.compare(assistant, tensors, rows, [2, 7], 7, [1], 1, seen)
    assert fitted.agreement > few.agreement
    assert whole.agreement == 1.0
    assert [(size, found["count"]) for size, found in dense.times.items()] == [(1, 2), (3, 2)]
    assert all(found["min"] > 0 for one in (dense, few, all_) for found in one.times.values())
    drawn = ContinueOptions(
        target_dir, tmp_path / "drawn", rows=2, max_tokens=9, greedy_fraction=0.0, dtype="float32"
    )
    run(drawn)
    with pytest.raises(ValueError, match="no greedily answered"):
        heads.rows_of(assistant, drawn.out_dir, 400, 30)


def test_the_table() -> None:
    time = {"median": 1012.3, "p25": 990.0, "p75": 1020.2}
    one = {"num_selected": 32, "mean_accepted": 1.234, "agreement": 0.98, "us_by_rows": {1: time}}
    lines = markdown({"heads": [one]}).splitlines()
    assert lines[0].endswith("| µs, 1 row |")
    assert lines[-1] == "| best 32 clusters | 1.234 | 98.0% | 1,012 (990 to 1,020) |"


def test_all_steps_of_a_chain_are_seen_in_turn() -> None:
    states = torch.arange(3 * 7).view(3, 7, 1)
    assert heads.in_turn(states).flatten().tolist() == [0, 8, 16, 3, 11, 19, 6]
