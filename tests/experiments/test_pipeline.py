"""The pipeline experiment's parts: points, lengths, prediction, counters, report."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from experiments import metrics_page
from experiments.dials.dials import Dials, fixed
from experiments.dials.drafter import DialledDrafter
from experiments.dials.script import Script, ScriptText
from experiments.dials.step_clock import StretchCurve
from experiments.pipeline import counts as counting
from experiments.pipeline.__main__ import pipeline
from experiments.pipeline.cell import (
    WAIT_BUDGET_US,
    Cell,
    Cycle,
    Shape,
    parse_counts,
    parse_list,
    round_trips_ms,
)
from experiments.pipeline.counts import Counts
from experiments.pipeline.measure import Arm, Lengths, arms_of, figures_of, parse_cycles, shape_of
from experiments.pipeline.picture import draw
from experiments.pipeline.prediction import (
    best_synchronous_length,
    enumerated_speedup,
    expected_tokens,
    hit_rate,
    predicted,
    synchronous_speedup,
)
from experiments.pipeline.priority import raise_priority
from experiments.pipeline.report import make_report, tables
from experiments.pipeline.sample import Sample
from paceline.contract.errors import InvalidRequestError, UnavailableError
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.trie import DraftTrie


def cell(
    acceptance: float,
    cost: float,
    round_trip: float,
    curve: str = "30",
    num_sequences: int = 1,
    **dials: float,
) -> Cell:
    step_ms = StretchCurve.parse(curve).step_s(num_sequences) * 1e3
    return Cell(
        dials=Dials.from_dict({"acceptance": acceptance, "draft_ms": cost * step_ms, **dials}),
        round_trip_ms=round_trip * step_ms,
        curve=StretchCurve.parse(curve),
        num_sequences=num_sequences,
    )


@pytest.mark.parametrize(
    ("acceptance", "cost", "round_trip", "length", "speedup"),
    [
        (0.7, 0.05, 0.0, 6, 2.35),
        (0.8, 0.05, 0.0, 8, 3.09),
        (0.8, 0.05, 0.5, 9, 2.29),
        (0.8, 0.05, 1.0, 10, 1.83),
        (0.8, 0.10, 0.2, 6, 2.20),
        (0.9, 0.05, 2.0, 20, 2.23),
    ],
)
def test_the_synchronous_form_where_it_is_known(
    acceptance: float, cost: float, round_trip: float, length: int, speedup: float
) -> None:
    point = cell(acceptance, cost, round_trip)
    assert best_synchronous_length(point) == length
    assert predicted(Cycle.SYNCHRONOUS, point, Shape(length)) == pytest.approx(speedup, abs=0.005)


def test_verification_and_rows_that_cost_shorten_the_draft() -> None:
    flat, steep = cell(0.8, 0.05, 0.5), cell(0.8, 0.05, 0.5, curve="1:30,11:60")
    assert steep.verify_cost(11) == pytest.approx(2)
    assert best_synchronous_length(steep) < best_synchronous_length(flat)
    many = cell(0.8, 0.05, 0.5, num_sequences=8, lane_cost=0.5)
    assert many.draft_cost(2) == pytest.approx(2 * 0.05 * (1 + 0.5 * 7))
    assert synchronous_speedup(many, 9) < synchronous_speedup(flat, 9)


def test_tokens_of_a_draft_that_is_always_right() -> None:
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.0, 5) == 1


def test_enumeration() -> None:
    point = cell(0.8, 0.05, 0.5, bonus_hit_rate=1.0)
    # All places and the end fit, and every correction is foreseen: each pass lasts a step.
    everything = Shape(5, 5, 7, WAIT_BUDGET_US)
    assert hit_rate(point, everything) == pytest.approx(1)
    assert predicted(Cycle.ENUMERATE, point, everything) == pytest.approx(expected_tokens(0.8, 5))
    # Never foreseen but at the end, where the drafter's own token may be right.
    unforeseen = cell(0.8, 0.05, 0.5, bonus_hit_rate=0.0)
    assert hit_rate(unforeseen, everything) == pytest.approx(0.8**6)
    # One outcome alone: the likeliest.
    assert hit_rate(point, Shape(5, 5, 1, WAIT_BUDGET_US)) == pytest.approx(0.8**6)
    # No more outcomes than a frame's 64 nodes hold: 5 + 9 times 6.
    assert hit_rate(
        cell(0.5, 0.05, 0.5, num_alternatives=4), Shape(5, 5, 64, WAIT_BUDGET_US)
    ) == pytest.approx(hit_rate(cell(0.5, 0.05, 0.5, num_alternatives=4), Shape(5, 5, 9, WAIT_BUDGET_US)))
    # Paths that come too late hold up every hit.
    late = cell(0.8, 0.05, 1.0, bonus_hit_rate=1.0)
    assert predicted(Cycle.ENUMERATE, late, everything) == pytest.approx(expected_tokens(0.8, 5) / 1.25)
    # One sequence that misses holds up the others.
    four = cell(0.8, 0.05, 0.5, num_sequences=4)
    rate = hit_rate(four, everything) ** 4
    expected = expected_tokens(0.8, 5) / (rate + (1 - rate) * 1.75)
    assert predicted(Cycle.ENUMERATE, four, everything) == pytest.approx(expected)
    # Without hits it is the synchronous cycle.
    assert enumerated_speedup(unforeseen, Shape(5, 5, 0, WAIT_BUDGET_US)) == pytest.approx(
        synchronous_speedup(unforeseen, 5)
    )


def test_the_hit_rate_is_what_the_drafter_does() -> None:
    """The form against the dialled drafter itself, outcome by outcome."""
    point = cell(0.7, 0.05, 0.5, bonus_hit_rate=0.6, num_alternatives=2)
    shape = Shape(4, 4, 5, WAIT_BUDGET_US)
    chooser = random.Random(8)
    text = ScriptText((1, 2, 3), tuple(chooser.randrange(300) for _ in range(6000)))
    made = DialledDrafter(Script((text,), 300), fixed(replace(point.dials, draft_ms=0.0)))
    made.open(1, text.prompt)
    right, length, hits, rounds = text.tokens, 3, 0, 0
    while length + 16 < len(right):
        (entry,) = made.draft([DraftRequest(1, 4)])
        (past,) = made.draft_outcomes([OutcomeRequest(1, 4, 5, 64)])
        assert entry is not None
        assert past is not None
        gained = next((i for i in range(4) if entry.tokens[i] != right[length + i]), 4) + 1
        trie = DraftTrie(right[:length])
        trie.add(past)
        hits += trie.commit(right[length : length + gained]).matched == gained
        made.extend(1, length, right[length : length + gained])
        length, rounds = length + gained, rounds + 1
    expected = hit_rate(point, shape)
    assert abs(hits - rounds * expected) < 4 * math.sqrt(rounds * expected * (1 - expected))


def test_the_forms_that_are_not_known_here_are_none() -> None:
    assert predicted(Cycle.ENUMERATE, cell(0.8, 0.05, 0.5), Shape(4, 6, 3, WAIT_BUDGET_US)) is None
    assert predicted(Cycle.ENUMERATE, cell(0.8, 0.05, 0.5), Shape(4, 4, 3, 0)) is None
    assert predicted(Cycle.PLAIN, cell(0.8, 0.05, 0.5), Shape(1)) == 1


@pytest.mark.parametrize(("round_trip", "expected"), [(0.5, 2.61), (1.0, 2.03)])
def test_a_chain_ahead_is_simulated(round_trip: float, expected: float) -> None:
    """Near the table of the continuous variant, whose target commits no token of its own behind a whole draft."""
    forecast = predicted(Cycle.AHEAD, cell(0.8, 0.05, round_trip), Shape(4, 4))
    assert forecast == pytest.approx(expected, rel=0.06)


def test_lengths() -> None:
    point = cell(0.8, 0.05, 0.5)
    assert shape_of(Cycle.SYNCHRONOUS, point, Lengths()) == Shape(9, wait_budget_us=1_000_000)
    assert shape_of(Cycle.AHEAD, point, Lengths(ahead=4, past=6)) == Shape(4, 6)
    assert shape_of(Cycle.ENUMERATE, point, Lengths(ahead=4, past=6, outcomes=3)) == Shape(4, 6, 3, 1_000_000)
    assert shape_of(Cycle.ENUMERATE, point, Lengths(outcomes=3, wait_budget_us=0)).wait_budget_us == 0
    for outcomes in (1, 3, 8, 31, 64):
        past = shape_of(Cycle.ENUMERATE, point, Lengths(outcomes=outcomes))
        assert past.draft_length >= 1
        assert past.draft_length + outcomes * (1 + past.draft_ahead) <= 64 or past.draft_length == 1
    assert shape_of(Cycle.AHEAD, point, Lengths()) == Shape(4, 12)
    assert shape_of(Cycle.AHEAD, point, Lengths(ahead=40)) == Shape(40, 24)  # no more than a frame holds
    policy = shape_of(Cycle.SYNCHRONOUS, point, Lengths()).policy(7)
    assert (policy.version, policy.draft_length, policy.max_nodes_per_sequence) == (7, 9, 9)


def test_every_cycle_at_every_point_and_plain_once_for_each_load() -> None:
    points = [cell(0.8, 0.05, r, num_sequences=n) for n in (1, 4) for r in (0.0, 0.5)]
    arms = arms_of(points, parse_cycles("synchronous,ahead", Lengths()))
    assert [arm.cycle for arm in arms].count(Cycle.PLAIN) == 2
    assert len(arms) == 2 + 8
    assert arms[0].cycle is Cycle.PLAIN


def test_cycles_may_name_lengths_of_their_own() -> None:
    common = Lengths(ahead=5, outcomes=3)
    assert parse_cycles("plain, synchronous:2,enumerate,planned", common) == [
        (Cycle.SYNCHRONOUS, Lengths(synchronous=2, ahead=2, outcomes=3)),
        (Cycle.ENUMERATE, common),
        (Cycle.PLANNED, common),
    ]
    for text in ("synchronous:0", "synchronous:64", "ahead:x", "ahead:1:2", "", "planned,"):
        with pytest.raises(InvalidRequestError, match="cycles"):
            parse_cycles(text, common)


def test_what_the_scheduler_decides_is_held_against_the_best_fixed_cycle() -> None:
    point = cell(0.8, 0.05, 0.5)
    assert shape_of(Cycle.PLANNED, point, Lengths()).policy(3) is None
    arms = arms_of(
        [point, cell(0.9, 0.05, 0.5)], parse_cycles("synchronous:2,planned,synchronous:4", Lengths())
    )
    for arm, speeds in zip(
        arms, ((10, 10), (15, 17), (18, 16), (14, 20), (1, 1), (3, 3), (2, 2)), strict=True
    ):
        arm.rounds += speeds
        arm.samples += [sample(0.1, 3)] * 2
        arm.wall_s, arm.counts = 1.0, Counts(step_s=0.5, num_steps=5)
    planned = [figures["over_best_fixed"] for figures in figures_of(arms) if figures["cycle"] == "planned"]
    # The longer fixed length is best in the median of the first point; plain decoding, 10 both times, of the second.
    assert planned == pytest.approx([(18 / 14 + 16 / 20) / 2, 0.3], abs=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--acceptance", "1.5"),
        ("--cost", "x"),
        ("--round-trips", "5,"),
        ("--sequences", "1.5"),
        ("--sequences", "65"),
        ("--cycles", "sideways"),
        ("--step-curve", "8:1,4:2"),
        ("--dials", "[1]"),
        ("--dials", '{"luck": 1}'),
        ("--dials", "{"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments: tuple[str, ...]) -> None:
    app = typer.Typer()
    app.command()(pipeline)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Error" in result.output


def test_real_time_priority_reaches_a_process_and_its_children() -> None:
    code = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            deadline_s = time.monotonic() + 20
            while not (children := psutil.Process(process.pid).children()):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            try:
                assert raise_priority([process.pid, 1 << 22]) >= 2
            except UnavailableError:
                pytest.skip("real-time priority takes CAP_SYS_NICE")
            for pid in (process.pid, children[0].pid):
                assert os.sched_getscheduler(pid) == os.SCHED_RR
            assert os.sched_getscheduler(0) == os.SCHED_OTHER
        finally:
            for child in psutil.Process(process.pid).children():
                child.kill()


def test_lists_and_round_trips() -> None:
    assert parse_counts("1,32", "x", 64) == [1, 32]
    assert parse_list("1, 2.5", "x") == [1, 2.5]
    assert round_trips_ms(["5", "0.5T", "2t"], 30.0) == [5, 15, 60]
    for text in ("", "a", "1,,2", "-1", "nan"):
        with pytest.raises(InvalidRequestError):
            parse_list(text, "x")


def sample(gap_s: float, per_chunk: int, num_chunks: int = 6, *, identical: bool = True) -> Sample:
    arrivals = tuple((index * gap_s, 1 + index * per_chunk) for index in range(num_chunks))
    return Sample(arrivals, num_chunks, identical)


def test_speed_leaves_the_first_and_the_last_chunk_out() -> None:
    one = sample(0.1, 3)
    assert one.tokens_per_s == pytest.approx(30)
    slow_start = Sample(((-5.0, 1), *one.arrivals[1:-1], (9.0, 17)), 6, True)
    assert slow_start.tokens_per_s == pytest.approx((13 - 1) / 5.4)
    with pytest.raises(ValueError, match="fewer than three"):
        _ = sample(0.1, 3, 2).tokens_per_s


def measured() -> list[Arm]:
    arms = arms_of([cell(0.8, 0.05, 0.5)], parse_cycles("synchronous,ahead", Lengths()))
    for arm, per_chunk in zip(arms, (1, 4, 5), strict=True):
        for _ in range(2):
            one = sample(0.1, per_chunk, identical=arm.cycle is not Cycle.AHEAD)
            arm.samples.append(one)
            arm.rounds.append(one.tokens_per_s)
            arm.wall_s += 1.0
        arm.counts = Counts(
            step_s=1.5, draft_wait_s=0.4, num_steps=12, num_drafts=10, num_cache_hits=4, link_bytes=420
        )
    return arms


def test_figures_report_table_and_picture(tmp_path: Path) -> None:
    figures = figures_of(measured())
    assert [arm["speedup"] for arm in figures] == [1.0, 4.0, 5.0]
    assert [arm["identical"] for arm in figures] == [True, True, False]
    synchronous = figures[1]
    assert synchronous["predicted"] == pytest.approx(2.289, abs=0.001)
    assert synchronous["hit_rate"] == pytest.approx(0.4)
    assert synchronous["bubble"] == pytest.approx(0.25)
    assert synchronous["bytes_per_token"] == pytest.approx(10)
    assert synchronous["ms_per_pass"] == pytest.approx(100)
    assert synchronous["without_luck"] == pytest.approx(expected_tokens(0.8, 9), abs=0.001)
    assert synchronous["at_once"] == 1
    assert figures[2]["without_luck"] is None
    report = make_report(figures, {"step_curve": "30", "rounds": 2, "max_tokens": 32})
    assert [len(table.rows) for table in tables(report)] == [3, 3, 3]
    draw(report, tmp_path / "pipeline.png")
    assert (tmp_path / "pipeline.png").stat().st_size > 5000


def test_counters_are_summed_over_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {
        "verifier": '# HELP x\npaceline_step_seconds_sum{model_name="m"} 1.5\npaceline_step_seconds_count 3\n'
        'paceline_speculation_cache_hits_total{model_name="a"} 2.0\n'
        'paceline_speculation_cache_hits_total{model_name="b"} 1.0\n'
        'paceline_step_seconds_bucket{le="0.1",model_name="m"} 9\n',
        "drafter": 'paceline_draft_seconds_sum{method="dialled",model_name="m"} 0.25\n',
    }

    class Page:
        def __init__(self, text: str) -> None:
            self._text = text

        def __enter__(self) -> Page:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self) -> bytes:
            return self._text.encode()

    monkeypatch.setattr(metrics_page.urllib.request, "urlopen", lambda url, timeout: Page(pages[url]))
    found = counting.read_counts("verifier", "drafter", 7)
    assert (found.step_s, found.num_steps, found.num_cache_hits, found.draft_s, found.link_bytes) == (
        1.5,
        3,
        3,
        0.25,
        7,
    )
    assert (found - found) == Counts()
    assert (found + found).num_cache_hits == 6
