"""What pairs of generations at several distances come to."""

from __future__ import annotations

from typer.testing import CliRunner

from experiments.bench.command import bench
from experiments.bench.sample import Sample
from experiments.distance.report import summarise, table
from experiments.distance.runner import Pair


def sample(seconds: float, num_passes: int, tokens: tuple[int, ...] = (1, 2, 3, 4)) -> Sample:
    return Sample(token_ids=tokens, elapsed_s=seconds, ttft_s=0.1, num_passes=num_passes)


def pair(plain_s: float, speculative_s: float, num_passes: int = 2, prompt_id: str = "a") -> Pair:
    return Pair(20.0, prompt_id, sample(plain_s, 4), sample(speculative_s, num_passes))


def test_medians_of_pairs_stand_beside_the_ratio_of_total_times() -> None:
    pairs = [pair(1.0, 1.0, 4), pair(1.0, 0.5, 2), pair(8.0, 2.0, 2, "b")]
    figures = summarise(pairs)
    assert figures["speedup"] == 2.0
    assert (figures["speedup_min"], figures["speedup_max"]) == (1.0, 4.0)
    assert figures["total"] == round(10.0 / 3.5, 3)
    assert figures["tokens_per_pass"] == round(12 / 8, 3)
    assert figures["num_pairs"] == 3
    assert figures["by_prompt"] == {
        "a": {"speedup": 1.5, "tokens_per_pass": round(8 / 6, 3)},
        "b": {"speedup": 4.0, "tokens_per_pass": 2.0},
    }


def test_the_middle_half_leaves_out_both_ends() -> None:
    pairs = [pair(1.0, 1.0) for _ in range(6)] + [pair(1.0, 100.0), pair(100.0, 1.0)]
    assert summarise(pairs)["middle_half"] == 1.0


def test_one_text_that_differs_is_said() -> None:
    wrong = Pair(20.0, "b", sample(1.0, 4), sample(0.5, 2, (1, 2, 3, 5)))
    figures = summarise([pair(1.0, 0.5), wrong])
    assert not figures["identical"]
    cells = [list(column.cells) for column in table([figures]).columns]
    assert cells[0] == ["20 ms"]
    assert cells[-1] == ["DIFFER"]


def test_round_trips_are_numbers() -> None:
    answer = CliRunner().invoke(bench, ["distance", "--round-trips", "near,far"])
    assert answer.exit_code == 2
    assert "separated by commas" in answer.output
