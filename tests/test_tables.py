"""Every table of the command line fits 80 columns: no word and no figure is broken or cut."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from experiments.bench.report import table as bench_table
from experiments.bench.runner import SERVED_MODES
from experiments.distance.report import table as distance_table
from experiments.evaluation.report import tables as evaluation_tables
from experiments.overhead.command import table as overhead_table
from experiments.pipeline.report import tables as pipeline_tables
from experiments.planner.command import _table as planner_table
from experiments.verification.command import _tables as verification_tables
from paceline.cli import main, up
from paceline.embedded import Placement, Ports
from paceline.embedded.ports import ROLES
from services.scheduler.commands.tables import curve_tables, policy_tables
from services.verifier.stopwatch import OVERHEAD

WIDTH = 80
FRAME = re.compile(r"[│┃┏┓┗┛━┳┻╇╈┡┩├┤┼└┘─┴┬]")


def shown(tables: Iterable[Table]) -> str:
    output = io.StringIO()
    console = Console(file=output, width=WIDTH)
    for table in tables:
        console.print(table)
    return output.getvalue()


def assert_fits(*tables: Table) -> None:
    """Words stay whole, and a cell with a figure stays on one line, unless it is made of lines or is a sentence."""
    text = FRAME.sub(" ", shown(tables))
    assert "…" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    words = {word for line in lines for word in line.split()}
    for table in tables:
        cells = [str(cell) for column in table.columns for cell in (column.header, *column.cells)]
        for cell in (*cells, str(table.title or "")):
            missing = set(cell.split()) - words
            assert not missing, f"broken: {missing} of {cell!r} in\n{text}"
            if len(cell) <= 24 and re.search(r"\d", cell) and "\n" not in cell:
                assert any(" ".join(cell.split()) in line for line in lines), f"{cell!r} is split in\n{text}"


PAIRS = [
    ("conductor-0.llm:50051", "paceline-drafter-1.paceline-drafter.llm.svc:50052"),
    ("127.0.0.1", "10.0.0.12:50052"),
]
STATS: dict[str, Any] = {
    "step": {
        "shift": 1.27,
        "per_context_token_s": 1.2e-5,
        "per_sequence_s": 1.3e-3,
        "rows": [
            {
                "rows": rows,
                "samples": 123_456,
                "measured_s": 12.3456,
                "at_256_s": 12.3456,
                "at_2048_s": 22.3456,
            }
            for rows in (1, 1024)
        ],
    },
    "draft": {"rounds": 123_456, "lengths": [{"draft_steps": 64, "sequences": 64, "seconds": 1.23456}]},
    "peers": [
        {
            "conductor": conductor,
            "drafter": drafter,
            "round_trips": 1_234_567,
            **{f"{name}_{q}_s": 12.34567 for name in ("round_trip", "queue") for q in ("p50", "p95")},
        }
        for conductor, drafter in PAIRS
    ],
    "acceptance_per_position": [1.0] * 20,
    "drafters": [
        {
            "drafter": "deepseek_mtp/0123456789ab",
            "acceptance_per_position": [1.0] * 20,
            "own_error": 0.123,
            "calibrated_error": 0.045,
            "own_diagram": [(0.5, 0.5, 1_234_567)] * 2,
            "calibrated_diagram": [(0.5, 0.5, 1_234_567)],
        }
    ],
    "tenants": [
        {
            "tenant": "research-group-of-the-third-floor",
            "num_requests": 12_345_678,
            "num_tokens": 1_234_567_890,
            "tokens_per_s": 12_345.6,
            "acceptance": 1.0,
        }
    ],
}


def test_curves() -> None:
    tables = list(curve_tables(STATS))
    assert len(tables) == 9
    assert_fits(*tables)


def test_policies() -> None:
    policy = {
        "written_at": "2026-12-01T06:54:43.123456+00:00",
        "version": 12_345,
        "draft_length": 64,
        "max_nodes_per_sequence": 64,
        "wait_budget_us": 1_000_000,
        "draft_ahead": 64,
        "num_outcomes": 64,
        "expected_speedup": 12.345,
        "reason": "length 64 of 64, expected 12.35 times plain decoding at 128 sequences with a round trip of 50 ms",
    }
    assert_fits(*policy_tables((policy, policy)))


def test_benchmarks() -> None:
    figures = {
        "tokens_per_s": 12_345.6,
        "tokens_per_s_min": 10_000.1,
        "tokens_per_s_max": 20_000.1,
        "tokens_per_pass": 12.34,
        "ttft_ms": 123_456,
    }
    report = {"model": "smollm2-135m", "dtype": "bfloat16", "max_tokens": 1024}
    assert_fits(bench_table(report | dict.fromkeys(("transformers", *SERVED_MODES), figures)))
    names = (
        "round_trip_ms",
        "speedup",
        "speedup_min",
        "speedup_max",
        "middle_half",
        "total",
        "tokens_per_pass",
    )
    assert_fits(distance_table([dict.fromkeys(names, 12.345) | {"identical": False}]))
    row = {
        "sequences": 1024,
        "speculation": True,
        "overhead_ms": 123.45,
        "share": 1.234,
        "forward_ms": 1234.5,
        "stages_ms": {stage.value: 12.34 for stage in OVERHEAD},
    }
    assert_fits(overhead_table([row], 30.5))
    mode = {"median_us": 12_345.6, "p10_us": 12_345.6, "p90_us": 12_345.6, "mean_nodes_chosen": 1023.4}
    sizes = {"sequences": 1024, "candidates": 64, "rounds": 30_000}
    assert_fits(planner_table({**sizes, "modes": {"full search": mode, "early stop": mode}}))


def test_verification() -> None:
    times = {"median_us": 1_234_567.0, "p10_us": 1_234_567.0, "p90_us": 1_234_567.0, "share": 1.234}
    batches = [
        {"sequences": n, "step": times, "verify": {"coupled, tree of 16": times}} for n in (1, 64, 1024)
    ]
    report = {"model": "smollm2-135m", "vocab_size": 262_144, "executor": "native", "batches": batches}
    assert_fits(*verification_tables(report))


def test_pipeline() -> None:
    numbers = ("acceptance", "cost", "round_trip", "speedup", "speedup_min", "speedup_max", "without_luck")
    more = ("predicted", "tokens_per_pass", "ms_per_pass", "at_once", "hit_rate", "bubble", "over_best_fixed")
    arm = dict.fromkeys((*numbers, *more), 0.875) | {
        "num_sequences": 1024,
        "round_trip_ms": 100.5,
        "bytes_per_token": 123_456,
        "identical": False,
        "draft_length": 63,
        "draft_ahead": 63,
        "outcomes": 64,
    }
    arms = [arm | {"cycle": cycle} for cycle in ("plain", "synchronous", "enumerate", "planned")]
    assert_fits(*pipeline_tables({"step_curve": "1:30,8:38", "rounds": 3, "max_tokens": 256, "arms": arms}))


def test_evaluations() -> None:
    spread = {"median": 123.456, "min": 100.123, "max": 200.456}
    result = {
        "drafts": "chain",
        "temperature": 0.8,
        "tokens_per_pass": 12.345,
        "standard_error": 0.123,
        "draft_ms": spread,
        "speed": spread,
        "bytes": {"to_drafter_per_cycle": 1_234_567, "to_target_per_cycle": 123_456},
        "acceptance": [{"unconditional": 0.5, "conditional": 0.5}] * 16,
        "compared": 1234,
        "identical": 1234,
    }
    latency = [{"length": length, "drafts": "chain", "ms": spread} for length in (1, 16)]
    drafter = {
        "name": "an-eagle3-drafter-of-mine",
        "method": "eagle3",
        "training": {"tokens": 1_234_567_890, "seconds": 1234567.8},
        "results": [result],
        "latency": latency,
    }
    assert_fits(*evaluation_tables({"drafters": [drafter] * 7}))


@pytest.mark.parametrize("arguments", [("methods",), ("modes",), ("models", "list")])
def test_lists(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[Table] = []
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    write = Console.print

    def record(console: Console, *values: Any, **options: Any) -> None:
        printed.extend(value for value in values if isinstance(value, Table))
        write(console, *values, **options)

    monkeypatch.setattr(Console, "print", record)
    with pytest.raises(SystemExit):
        main(arguments)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= WIDTH
    assert printed
    assert_fits(*printed)


def test_up() -> None:
    ports = Ports.default(65_000, 65_100)
    deployment = SimpleNamespace(
        processes=dict.fromkeys(("redis", *ROLES), 4_194_304),
        ports=ports,
        endpoint=lambda role: f"127.0.0.1:{ports.grpc[role]}",
        metrics_url=lambda role: f"http://127.0.0.1:{ports.metrics[role]}/metrics",
        plan=SimpleNamespace(describe=lambda: ["verifier 0"]),
    )
    output = io.StringIO()
    up._show(deployment, Placement.SEPARATE, Console(file=output, width=WIDTH, soft_wrap=True))  # type: ignore[arg-type]
    lines = output.getvalue().splitlines()
    assert any(
        line.split() == ["drafter", "4194304", "127.0.0.1:65002", "http://127.0.0.1:65102/metrics"]
        for line in lines
    )
    assert max(map(len, lines)) <= WIDTH
