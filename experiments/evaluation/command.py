"""`paceline evaluate`: acceptance, draft time, bytes and speed of drafters on held-out prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.sampling.params import VerifyMode


def evaluate(
    drafters: Annotated[
        list[str] | None,
        typer.Argument(help="Drafter checkpoints, or fetched models; the shipped drafter by default."),
    ] = None,
    model: Annotated[str, typer.Option(help="Name of a fetched model or a directory.")] = "smollm2-135m",
    json_path: Annotated[
        str | None, typer.Option("--json", help="Where to write the figures; - prints them and nothing else.")
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as docs/methods/README.md shows it.")
    ] = False,
    latency: Annotated[
        bool, typer.Option("--latency", help="Time blocks of 1 to 16 tokens as well.")
    ] = False,
    latency_repeats: Annotated[int, typer.Option(min=1, help="Blocks of each length that are timed.")] = 20,
    prompts: Annotated[
        int, typer.Option(min=1, max=8, help="Held-out prompts of each kind: chat, code, summary.")
    ] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over the prompts, with seeds of their own.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per generation.")] = 128,
    draft_length: Annotated[int, typer.Option(min=1, max=64, help="Tokens in a row.")] = 5,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Nodes of a tree.")] = 10,
    temperatures: Annotated[str, typer.Option(help="Separated by commas; 0 is greedy.")] = "0,0.8",
    mode: Annotated[VerifyMode, typer.Option(help="Verification above temperature 0.")] = VerifyMode.COUPLED,
    seed: Annotated[int, typer.Option(min=0, help="Of the first prompt; the next one's is one more.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 1,
) -> None:
    """Measure drafters on held-out prompts, in one process, beside plain decoding in turn.

    Everything but times depends on the seed alone.
    """
    from experiments.bench.prompts import held_out_prompts
    from experiments.evaluation import latency as blocks
    from experiments.evaluation.measure import Stage, measure
    from experiments.evaluation.plan import Plan
    from experiments.evaluation.report import caption, latency_table, make_report, markdown, tables
    from paceline.drafters import default_drafter
    from paceline.errors import InvalidRequestError
    from paceline.models import resolve
    from paceline.target import configure_threads

    if mode is VerifyMode.GREEDY:
        raise InvalidRequestError("mode", "greedy is what temperature 0 means; name a mode for the others")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise InvalidRequestError("dtype", f"must be bfloat16, float16 or float32, not {dtype!r}")
    configure_threads(threads)
    plan = Plan(
        model_dir=resolve(model),
        drafter_dirs=tuple(_directory(drafter) for drafter in drafters or [str(default_drafter(model))]),
        temperatures=_temperatures(temperatures),
        mode=mode,
        prompts_per_kind=prompts,
        rounds=rounds,
        max_tokens=max_tokens,
        draft_length=draft_length,
        max_nodes=nodes,
        seed=seed,
        dtype=dtype,
        device=device,
    )
    console = Console(stderr=True)
    with console.status("") as status:
        stage = Stage.load(plan, held_out_prompts(prompts))
        contestants = measure(plan, stage, status.update)
        found = [
            blocks.latency(plan, stage, contestant, latency_repeats, status.update) if latency else []
            for contestant in contestants
        ]
    given = sys.argv[2:] if sys.argv[1:2] == ["evaluate"] else sys.argv[1:]
    report = make_report(plan, stage, contestants, found, threads, " ".join(["paceline evaluate", *given]))
    if json_path == "-":
        typer.echo(json.dumps(report, indent=2))
    elif json_path is not None:
        Path(json_path).parent.mkdir(parents=True, exist_ok=True)
        Path(json_path).write_text(json.dumps(report, indent=2) + "\n")
        console.print(f"wrote {json_path}", highlight=False)
    if as_markdown:
        typer.echo(markdown(report), nl=False)
    elif json_path != "-":
        shown = Console()
        shown.print(caption(report), highlight=False, markup=False)
        for table in tables(report):
            shown.print(table)
        if latency:
            shown.print(latency_table(report))
    differing = [
        f"{drafter['name']}, {result['drafts']}, T = {result['temperature']:g}"
        for drafter in report["drafters"]
        for result in drafter["results"]
        if result["compared"] and result["identical"] < result["compared"]
    ]
    if differing:
        console.print(f"[bold]drafts changed the text:[/] {'; '.join(differing)}", highlight=False)
        raise typer.Exit(1)


def _directory(drafter: str) -> Path:
    from paceline.models import MODELS, resolve

    return resolve(drafter) if drafter in MODELS else Path(drafter)


def _temperatures(given: str) -> tuple[float, ...]:
    from paceline.errors import InvalidRequestError

    try:
        found = tuple(float(part) for part in given.split(","))
    except ValueError:
        raise InvalidRequestError("temperatures", f"{given!r} are not numbers separated by commas") from None
    return tuple(dict.fromkeys(found))
