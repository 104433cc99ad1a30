"""`paceline evaluate`: its counts against a recount from the texts alone, its bytes, its tables, and a real run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from experiments.bench.prompts import embedded_prompts, held_out_prompts, token_ids
from experiments.decoding.generation import Pass
from experiments.evaluation import document as documents
from experiments.evaluation.command import evaluate
from experiments.evaluation.figures import acceptance, figures_of, num_bytes, spread
from experiments.evaluation.latency import LENGTHS, latency
from experiments.evaluation.measure import Contestant, Stage, Way, measure
from experiments.evaluation.plan import CHAIN, TREE, Plan
from experiments.evaluation.report import HEADS, markdown, rows_of, tables
from paceline.models import DEFAULT_MODEL, cached, resolve
from paceline.sampling.params import VerifyMode
from paceline.target import TargetEngine
from paceline.training.prompts import TOPIC_TASKS, TOPICS
from tests.methods.conftest import (  # noqa: F401  fixtures
    eagle3_dir,
    eagle3_tensors,
    independent_dir,
    p_eagle_dir,
    p_eagle_tensors,
    pard2_dir,
    pard_model_dir,
    target_dir,
    text,
)

STOP = 41


@pytest.fixture(scope="module")
def plan(target_dir: Path) -> Plan:  # noqa: F811
    return Plan(
        target_dir,
        max_tokens=30,
        draft_length=3,
        max_nodes=7,
        seed=5,
        dtype="float32",
    )


@pytest.fixture(scope="module")
def stage(plan: Plan) -> Stage:
    engine = TargetEngine.load(plan.model_dir, "cpu", torch.float32)
    prompts = tuple(
        (kind, tuple(text(length, length))) for kind, length in (("chat", 9), ("code", 14), ("chat", 5))
    )
    return Stage(engine, prompts, frozenset({STOP}))


@pytest.fixture(scope="module")
def dirs(eagle3_dir: Path, independent_dir: Path) -> tuple[Path, ...]:  # noqa: F811
    return eagle3_dir, independent_dir


def measured(plan: Plan, stage: Stage, dirs: Sequence[Path]) -> list[Contestant]:
    found = [stage.enter(plan, directory, directory.name) for directory in dirs]
    for contestant in found:
        measure(plan, stage, contestant)
    return found


@pytest.fixture(scope="module")
def contestants(plan: Plan, stage: Stage, dirs: tuple[Path, ...]) -> list[Contestant]:
    return measured(plan, stage, dirs)


def recount(generated: list[int], passes: list[Pass]) -> dict[str, list[int]]:
    """Acceptance from the final text and the verified trees alone: how far the text follows each tree."""
    place = len(passes[0].tokens)
    found: dict[str, list[int]] = {name: [0] * 8 for name in ("drafted", "reached", "accepted")}
    for one in passes[1:]:
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(one.tree.tokens, one.tree.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        follows = tuple(generated[place:])
        accepted = max((len(path) for path in paths if follows[: len(path)] == path), default=0)
        for depth in range(1, 8):
            found["drafted"][depth] += any(len(path) == depth for path in paths)
            found["accepted"][depth] += accepted >= depth
            # The text went on, and something was drafted behind what it had accepted.
            found["reached"][depth] += accepted >= depth or (
                accepted == depth - 1
                and len(follows) > accepted
                and any(len(path) == depth and path[:-1] == follows[: depth - 1] for path in paths)
            )
        place += accepted + 1
    return found


def ways(contestants: list[Contestant]) -> list[Way]:
    return [way for contestant in contestants for way in contestant.ways]


def test_counts_are_those_of_a_recount(contestants: list[Contestant]) -> None:
    assert [[(w.temperature, w.arm.name) for w in c.ways] for c in contestants] == [
        [(0.0, CHAIN), (0.0, TREE), (0.8, CHAIN), (0.8, TREE)],
        [(0.0, CHAIN), (0.8, CHAIN)],  # an independent model drafts no trees of likeliest tokens
    ]
    num_accepted = 0
    for way in ways(contestants):
        assert [one.kind for one in way.generations] == ["chat", "code", "chat"]
        totals = {name: [0] * 8 for name in ("drafted", "reached", "accepted")}
        for generation in way.generations:
            for name, counts in recount(list(generation.tokens), list(generation.passes)).items():
                totals[name] = [a + b for a, b in zip(totals[name], counts, strict=True)]
        figures = figures_of(way)
        rows = figures["acceptance"]
        for name, counts in totals.items():
            assert [row[name] for row in rows] == counts[1 : len(rows) + 1]
        assert not any(totals["drafted"][len(rows) + 1 :])
        num_passes = sum(len(one.passes) - 1 for one in way.generations)
        num_tokens = sum(len(one.tokens) - 1 for one in way.generations)
        assert figures["tokens_per_pass"] == round(num_tokens / num_passes, 4)
        num_accepted += sum(totals["accepted"])
        num_drafts = sum(len(p.tree) > 0 for one in way.generations for p in one.passes)
        for row in rows:
            assert row["unconditional"] == round(row["accepted"] / num_drafts, 4)
            assert row["conditional"] == (
                round(row["accepted"] / row["reached"], 4) if row["reached"] else None
            )
    assert num_accepted > 20


def test_texts_are_the_plain_ones_and_end_where_they_end(contestants: list[Contestant]) -> None:
    found = ways(contestants)
    for way in found:
        assert (way.num_identical, way.is_comparable) == (3, True)
    lengths = [len(one.tokens) for one in found[0].plain]
    assert all(one.tokens[-1] == STOP or len(one.tokens) == 30 for way in found for one in way.plain)
    assert max(lengths) == 30


def test_modes_whose_text_may_differ_are_not_compared(
    plan: Plan, stage: Stage, dirs: tuple[Path, ...]
) -> None:
    changed = replace(plan, mode=VerifyMode.REJECTION, temperatures=(0.8,), max_tokens=8)
    found = measured(changed, stage, dirs[1:])
    assert [way.arm.name for way in ways(found)] == [CHAIN, TREE]  # siblings are drawn beside its chain
    for way in ways(found):
        figures = figures_of(way)
        assert (figures["identical"], figures["compared"], figures["exact"]) == (None, 0, True)


def test_everything_but_times_depends_on_the_seed_alone(
    plan: Plan, stage: Stage, dirs: tuple[Path, ...]
) -> None:
    short = replace(plan, max_tokens=12)

    def counted(one: Plan) -> list[dict]:
        found = [figures_of(way) for way in ways(measured(one, stage, dirs[:1]))]
        times = ("draft_ms", "verify_ms", "speed", "tokens_per_s")
        return [{name: value for name, value in figures.items() if name not in times} for figures in found]

    assert counted(short) == counted(short)
    assert counted(short) != counted(replace(short, seed=6))


def test_bytes_are_those_of_the_frames(contestants: list[Contestant]) -> None:
    eagle3, independent = contestants
    for way in eagle3.ways:
        sizes = num_bytes(way.generations)
        assert sizes["features_per_token"] == 64 * 4  # fused to the drafter's width, float32 here
        assert sizes["to_drafter_per_cycle"] is not None
        assert sizes["to_drafter_per_cycle"] > 64 * 4
    for way in independent.ways:
        sizes = num_bytes(way.generations)
        assert sizes["features_per_token"] == 0
        assert sizes["to_drafter_per_cycle"] is not None
        assert sizes["to_drafter_per_cycle"] < 40
        assert sizes["to_target_per_cycle"] is not None
        assert 10 < sizes["to_target_per_cycle"] < 60


def test_optional_features_are_measured_with_and_without(
    plan: Plan,
    stage: Stage,
    pard2_dir: Path,  # noqa: F811
) -> None:
    short = replace(plan, temperatures=(0.0,), max_tokens=8)
    (contestant,) = measured(short, stage, [pard2_dir])
    found = {way.arm.name: num_bytes(way.generations) for way in contestant.ways}
    assert list(found) == [CHAIN, TREE, "chain, no features", "tree, no features"]
    assert all(way.num_identical == 3 for way in contestant.ways)
    assert [sizes["features_per_token"] for sizes in found.values()] == [64 * 4, 64 * 4, 0, 0]
    drafts = [
        [one.draft.tokens for g in way.generations for one in g.passes if one.draft]
        for way in contestant.ways
    ]
    assert len(drafts[0]) == len(drafts[2]) > 9
    assert drafts[0] != drafts[2]
    assert {row["drafts"] for row in latency(short, stage, contestant, 0)} == set(found)


def test_a_speed_is_that_of_pairs() -> None:
    assert spread([]) is None
    assert spread([2.0]) == {"median": 2.0, "p25": 2.0, "p75": 2.0, "min": 2.0, "max": 2.0, "count": 1}
    found = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found is not None
    assert (found["median"], found["p25"], found["p75"]) == (3.0, 2.0, 4.0)
    assert acceptance([]) == []


def test_blocks_are_timed_at_every_length_for_every_way(
    plan: Plan, stage: Stage, contestants: list[Contestant]
) -> None:
    for contestant, names in zip(contestants, ([CHAIN, TREE], [CHAIN]), strict=True):
        rows = latency(plan, stage, contestant, 2)
        assert [(row["drafts"], row["length"]) for row in rows] == [(n, k) for n in names for k in LENGTHS]
        fits = [row for row in rows if row["ms"] is not None]
        assert all(row["ms"]["count"] <= 2 and row["ms"]["min"] > 0 for row in fits)
        assert len(fits) >= 16


def test_chains_longer_than_a_drafter_makes_have_no_time(
    plan: Plan,
    stage: Stage,
    p_eagle_dir: Path,  # noqa: F811
) -> None:
    short = replace(plan, temperatures=(0.0,), max_tokens=4)
    (contestant,) = measured(short, stage, [p_eagle_dir])
    longest = contestant.drafter.longest_draft
    assert longest is not None
    rows = [row for row in latency(short, stage, contestant, 1) if row["drafts"] == CHAIN]
    assert [row["length"] for row in rows if row["ms"] is not None] == [*range(1, longest + 1)]


def test_the_report_has_a_row_for_each_way(plan: Plan, stage: Stage, contestants: list[Contestant]) -> None:
    document = documents.begin(plan, [kind for kind, _ in stage.prompts], 1, "it")
    for contestant in contestants:
        blocks = [{"drafts": CHAIN, "length": length, "ms": spread([1.0])} for length in LENGTHS]
        documents.add(
            document,
            documents.target_entry(plan, stage),
            documents.drafter_entry(contestant, contestant.name, blocks),
        )
    assert json.loads(json.dumps(document)) == document
    assert document["prompts"] == {"chat": 2, "code": 1}
    (target,) = document["targets"]
    assert [drafter["reads"] for drafter in target["drafters"]] == ["three layers, fused", "nothing"]
    assert target["drafters"][0]["training"] == {"tokens": None, "steps": None, "seconds": None}
    rows = rows_of(target)
    assert len(rows) == 6
    assert all(len(row) == len(HEADS) for row in rows)
    assert [row[HEADS.index("same text")] for row in rows] == ["3 of 3"] * 6
    lines = markdown(document).splitlines()
    assert lines[0] == "`it`"
    assert lines[4] == f"#### {target['name']} in float32 on cpu"
    assert [line.count("|") for line in lines[6:14]] == [len(HEADS) + 1] * 8
    assert sum(line.startswith("| ") for line in lines[15:]) == 1 + 2
    assert [table.row_count for table in tables(target)] == [4, 4, 2, 2, *[2] * 4]


def test_held_out_prompts_are_held_out() -> None:
    prompts = held_out_prompts()
    assert [prompt.kind for prompt in held_out_prompts(2)] == ["chat", "code", "summary"] * 2
    kinds = [prompt.kind for prompt in prompts]
    assert {kind: kinds.count(kind) for kind in kinds} == {"chat": 8, "code": 8, "summary": 8}
    assert len({prompt.prompt_id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 24
    assert not {prompt.text for prompt in prompts} & {prompt.text for prompt in embedded_prompts()}
    asked = {task.format(topic) for task in TOPIC_TASKS for topic in TOPICS}
    assert not {prompt.text for prompt in prompts} & asked


APP = typer.Typer()
APP.command()(evaluate)


@pytest.mark.skipif(cached(DEFAULT_MODEL) is None, reason="needs the default model")
def test_a_short_run_on_the_real_model(tmp_path: Path) -> None:
    options = ["--prompts", "1", "--max-tokens", "12", "--draft-length", "3", "--nodes", "6"]
    done = CliRunner().invoke(APP, [*options, "--json", str(tmp_path / "found.json"), "--markdown"])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "found.json").read_text())
    (target,) = report["targets"]
    assert (target["name"], target["dtype"]) == (DEFAULT_MODEL, "bfloat16")
    (drafter,) = target["drafters"]
    assert (drafter["method"], drafter["training"]["tokens"]) == ("eagle3", 8126671)
    assert [(r["temperature"], r["drafts"]) for r in drafter["results"]] == [
        (t, drafts) for t in (0.0, 0.8) for drafts in (CHAIN, TREE)
    ]
    for result in drafter["results"]:
        assert (result["identical"], result["compared"]) == (3, 3)
        assert set(result["by_kind"]) == {"chat", "code", "summary"}
        assert result["tokens_per_pass"] > 1
        assert result["bytes"]["features_per_token"] == 576 * 2
        assert result["speed"]["count"] == 3
    assert "smollm2-135m-eagle3 (eagle3) | three layers, fused | tree | 0.8 |" in done.stdout


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--mode", "greedy"], "mode"),
        (["--dtype", "int8"], "dtype"),
        (["--temperatures", "warm"], "temperatures"),
        (["--resume"], "resume"),
        (["--from-json", "found.json", "some-drafter"], "from-json"),
    ],
)
def test_wrong_options_are_named(options: list[str], field: str) -> None:
    done = CliRunner().invoke(APP, options)
    assert done.exit_code != 0
    assert field in str(done.exception)


def test_a_prompt_stands_in_the_chat_template_where_there_is_one() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve(DEFAULT_MODEL), local_files_only=True)
    bare = tokenizer.encode("Why?")
    assert len(chat := token_ids(tokenizer, "Why?")) > len(bare)
    assert any(chat[i : i + len(bare)] == bare for i in range(len(chat)))
    tokenizer.chat_template = None
    assert token_ids(tokenizer, "Why?") == bare
