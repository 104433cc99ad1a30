"""`paceline evaluate` over files: which drafter goes with which target, going on, merging, and the pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from experiments.bench.prompts import Prompt
from experiments.evaluation import document as documents
from experiments.evaluation import picture, run
from experiments.evaluation.command import evaluate
from experiments.evaluation.measure import Stage
from experiments.evaluation.pairing import pair
from experiments.evaluation.plan import Plan
from experiments.evaluation.report import heading
from paceline.contract.errors import InvalidRequestError
from paceline.methods.checkpoint import CheckpointError
from paceline.target import TargetEngine
from tests.methods.conftest import (  # noqa: F401  fixtures
    eagle3_dir,
    eagle3_tensors,
    independent_dir,
    pard_model_dir,
    target_dir,
    text,
)

APP = typer.Typer()
APP.command()(evaluate)


def acceptance(counts: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """As `figures.acceptance` gives it, of `(reached, accepted)` by position."""
    drafts = counts[0][0]
    return [
        {
            "position": place,
            "drafted": drafts,
            "reached": reached,
            "accepted": accepted,
            "unconditional": round(accepted / drafts, 4),
            "conditional": round(accepted / reached, 4),
        }
        for place, (reached, accepted) in enumerate(counts, start=1)
    ]


def spread(middle: float) -> dict[str, float]:
    return {"median": middle, "p25": 0.9 * middle, "p75": 1.2 * middle, "min": 0.0, "max": 9.0, "count": 3}


def drafter(name: str, method: str, slope: float, fingerprint: str = "0") -> dict[str, Any]:
    """A drafter of the document, whose blocks take 2 ms and `slope` more for each token."""
    results = [
        {
            "temperature": temperature,
            "drafts": drafts,
            "tokens_per_pass": 1.5,
            "standard_error": 0.1,
            "acceptance": acceptance([(90, 60), (60, 30), (30, 12), (12, 5), (5, 0)]),
            "bytes": {"to_drafter_per_cycle": 9.0, "to_target_per_cycle": 5.0},
            "identical": 3,
            "compared": 3,
            "draft_ms": spread(2.0),
            "speed": spread(1.1),
        }
        for temperature in (0.0, 0.8)
        for drafts in ("chain", "tree")
    ]
    blocks = [
        {"drafts": "chain", "length": length, "ms": spread(2 + slope * length) if length < 9 else None}
        for length in range(1, 17)
    ]
    return {
        "name": name,
        "fingerprint": fingerprint,
        "method": method,
        "reads": "it",
        "training": {},
        "results": results,
        "latency": blocks if slope >= 0 else [],
    }


def whole(*drafters: dict[str, Any], target: str = "first", **changes: Any) -> dict[str, Any]:
    """A document of one target."""
    settings = Plan(Path("x"), prompts_per_kind=1)
    document = documents.begin(settings, ["chat", "code"], 1, f"paceline evaluate {target}")
    entry = {"name": target, "fingerprint": target, "dtype": "bfloat16", "device": "cpu", "drafters": []}
    for one in drafters:
        documents.add(document, entry, one)
    return {**document, **changes}


def names(document: dict[str, Any]) -> dict[str, list[str]]:
    return {target["name"]: [one["name"] for one in target["drafters"]] for target in document["targets"]}


def test_documents_of_several_runs_become_one() -> None:
    one = whole(drafter("a", "eagle1", 1.0), drafter("b", "p_eagle", 0.0, "old"))
    two = whole(drafter("b", "p_eagle", 0.0, "new"), drafter("c", "dflash", 0.0))
    other = whole(drafter("a", "eagle1", 1.0), target="second")
    merged = documents.merge([one, two, other])
    assert names(merged) == {"first": ["a", "b", "c"], "second": ["a"]}
    assert merged["targets"][0]["drafters"][1]["fingerprint"] == "new"  # the later run's
    assert merged["commands"] == ["paceline evaluate first", "paceline evaluate second"]
    assert len(merged["machines"]) == 1
    assert names(one) == {"first": ["a", "b"]}  # what was merged is as it was
    float32 = whole(drafter("a", "eagle1", 1.0))
    float32["targets"][0]["dtype"] = "float32"
    assert [heading(t) for t in documents.merge([one, float32])["targets"]] == [
        "first in bfloat16 on cpu",
        "first in float32 on cpu",
    ]
    with pytest.raises(InvalidRequestError, match="seed differs: 1 and 2"):
        documents.merge([one, whole(seed=2)])


def test_what_a_document_holds() -> None:
    document = whole(drafter("a", "eagle1", 1.0, "mark"), drafter("b", "eagle2", -1.0, "mark"))
    target = document["targets"][0]
    assert documents.holds(document, target, "a", "mark", has_blocks=True)
    assert not documents.holds(document, target, "a", "another", has_blocks=False)
    assert documents.holds(document, target, "b", "mark", has_blocks=False)
    assert not documents.holds(document, target, "b", "mark", has_blocks=True)
    assert not documents.holds(document, {**target, "dtype": "float32"}, "a", "mark", has_blocks=False)


def test_a_file_is_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "new" / "found.json"
    documents.write(path, whole(drafter("a", "eagle1", 1.0)))
    assert documents.read(path) == whole(drafter("a", "eagle1", 1.0))
    assert [file.name for file in path.parent.iterdir()] == ["found.json"]
    path.write_text("{")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        documents.read(path)
    path.write_text('{"seed": 1}')
    with pytest.raises(InvalidRequestError, match="no evaluation: commands, "):
        documents.read(path)


def test_drafters_go_with_the_target_they_were_made_for(
    target_dir: Path,  # noqa: F811
    eagle3_dir: Path,  # noqa: F811
    pard_model_dir: Path,  # noqa: F811
) -> None:
    pairs = pair([eagle3_dir, pard_model_dir], [target_dir, pard_model_dir])
    assert {model: [entry.directory for entry in found] for model, found in pairs.items()} == {
        target_dir: [eagle3_dir, pard_model_dir],
        pard_model_dir: [],  # a model drafts for every other one, and not for itself
    }
    assert [entry.suits_any for entry in pairs[target_dir]] == [False, True]
    with pytest.raises(CheckpointError, match="was made for target 'tiny', which is not among pard_model"):
        pair([eagle3_dir], [pard_model_dir])
    with pytest.raises(CheckpointError, match="is the target itself"):
        pair([pard_model_dir], [pard_model_dir])


def test_two_checkpoints_of_one_name_are_told_apart(
    target_dir: Path,  # noqa: F811
    independent_dir: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    for parent in ("first", "second"):
        (tmp_path / parent).mkdir()
        (tmp_path / parent / "export").symlink_to(independent_dir)
    dirs = [tmp_path / parent / "export" for parent in ("first", "second")]
    found = pair(dirs, [target_dir])[target_dir]
    assert [entry.name for entry in found] == ["first/export", "second/export"]


def test_a_run_goes_on_where_it_was_stopped(
    target_dir: Path,  # noqa: F811
    eagle3_dir: Path,  # noqa: F811
    independent_dir: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(cls: type[Stage], plan: Plan, prompts: Sequence[Prompt]) -> Stage:
        engine = TargetEngine.load(plan.model_dir, "cpu", torch.float32)
        return Stage(engine, tuple((one.kind, tuple(text(9, 5))) for one in prompts), frozenset())

    measured: list[str] = []
    measure = run.measure

    def measure_or_stop(plan: Plan, stage: Stage, contestant: Any, progress: Any) -> None:
        if stops and measured:
            raise KeyboardInterrupt
        measured.append(contestant.name)
        measure(plan, stage, contestant, progress)

    monkeypatch.setattr(Stage, "load", classmethod(load))
    monkeypatch.setattr(run, "measure", measure_or_stop)
    plan = Plan(
        target_dir, temperatures=(0.0,), prompts_per_kind=1, max_tokens=4, draft_length=2, dtype="float32"
    )
    pairs = {plan: pair([eagle3_dir, independent_dir], [target_dir])[target_dir]}
    path, console = tmp_path / "found.json", Console(file=StringIO())
    first, second = eagle3_dir.name, independent_dir.name

    def start(*, resume: bool = True, seed: int = 1) -> dict[str, Any]:
        changed = {replace(plan, seed=seed): entries for plan, entries in pairs.items()}
        return run.run(changed, "it", threads=1, latency_repeats=0, path=path, resume=resume, console=console)

    stops = True
    with pytest.raises(KeyboardInterrupt):
        start()
    assert names(documents.read(path)) == {target_dir.name: [first]}
    stops = False
    assert names(start()) == {target_dir.name: [first, second]}
    assert measured == [first, second]
    assert start() == documents.read(path)
    assert measured == [first, second]
    with pytest.raises(InvalidRequestError, match="seed differs"):
        start(seed=2)
    start(resume=False)
    assert measured == [first, second] * 2


def test_pictures_of_recorded_figures(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    documents.write(one, whole(drafter("a", "eagle1", 1.0), drafter("b", "p_eagle", 0.0)))
    documents.write(two, whole(drafter("c", "gemma4_mtp", 0.5), target="second"))
    options = ["--from-json", str(one), "--from-json", str(two), "--plots", str(tmp_path / "plots")]
    done = CliRunner().invoke(APP, [*options, "--json", str(tmp_path / "both.json"), "--markdown"])
    assert done.exit_code == 0, done.output
    assert [line for line in done.stdout.splitlines() if line.startswith("####")] == [
        "#### first in bfloat16 on cpu",
        "#### second in bfloat16 on cpu",
    ]
    assert names(json.loads((tmp_path / "both.json").read_text())) == {"first": ["a", "b"], "second": ["c"]}
    for name in ("acceptance.png", "latency.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
    without = whole(drafter("d", "medusa1", -1.0))
    assert [file.name for file in picture.draw(without, tmp_path / "fewer")] == ["acceptance.png"]


def test_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot
    from matplotlib.axes import Axes

    drawn: list[tuple[list[float], list[float], Any]] = []
    draw_line = Axes.errorbar

    def errorbar(self: Axes, x: list[float], y: list[float], **options: Any) -> Any:
        drawn.append((x, y, options["yerr"]))
        return draw_line(self, x, y, **options)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    picture.draw(whole(drafter("a", "eagle1", 1.0), drafter("b", "p_eagle", 0.0)), tmp_path)
    assert len(drawn) == 2 * 2 + 2
    places, shares, errors = drawn[0]
    assert [round(place) for place in places] == [1, 2, 3, 4]  # of the fifth only five passes know
    assert places[0] != drawn[1][0][0]
    assert shares == pytest.approx([60 / 90, 30 / 60, 12 / 30, 5 / 12])
    assert errors == pytest.approx(
        [picture.standard_error(k, n) for k, n in ((60, 90), (30, 60), (12, 30), (5, 12))]
    )
    lengths, middles, (below, above) = drawn[-2]
    assert (lengths, middles) == ([*range(1, 9)], [2 + 1.0 * k for k in range(1, 9)])
    assert below == pytest.approx([0.1 * ms for ms in middles])
    assert above == pytest.approx([0.2 * ms for ms in middles])
    assert not pyplot.get_fignums()
    assert picture.standard_error(0, 100) > 0.005
    assert picture.standard_error(50, 100) == pytest.approx(0.05, rel=1e-3)
