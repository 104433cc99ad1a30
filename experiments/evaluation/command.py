"""`paceline evaluate`: acceptance, draft time, bytes and speed of drafters on held-out prompts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.sampling.params import VerifyMode


def evaluate(
    drafters: Annotated[
        list[str] | None,
        typer.Argument(help="Drafter checkpoints, or fetched models; by default what ships for the targets."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Target: name of a fetched model or a directory; smollm2-135m by default. Several may be named: each "
            "drafter goes with the one it was made for."
        ),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json",
            help="Where to write the figures, after each drafter; - prints them and nothing else.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep what the file of --json holds, and measure what it does not."),
    ] = False,
    from_json: Annotated[
        list[Path] | None,
        typer.Option(help="Measure nothing: show the figures of this file; of several as one table."),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(help="Folder for acceptance.png and, with --latency, latency.png."),
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables as docs/methods/README.md shows them.")
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
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 1,
) -> None:
    """Measure drafters on held-out prompts, in one process, beside plain decoding in turn.

    Everything but times depends on the seed alone.
    """
    from experiments.evaluation import document as documents
    from experiments.evaluation.pairing import pair
    from experiments.evaluation.plan import Plan
    from experiments.evaluation.run import run
    from paceline.contract.errors import InvalidRequestError
    from paceline.methods.loading import default_drafter
    from paceline.models import DEFAULT_MODEL, resolve

    if mode is VerifyMode.GREEDY:
        raise InvalidRequestError("mode", "greedy is what temperature 0 means; name a mode for the others")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise InvalidRequestError("dtype", f"must be bfloat16, float16 or float32, not {dtype!r}")
    path = None if json_path in (None, "-") else Path(str(json_path))
    if resume and path is None:
        raise InvalidRequestError("resume", "--json must name the file to go on with")
    console = Console(stderr=True)
    if from_json:
        if drafters or resume:
            raise InvalidRequestError("from-json", "figures come from files: name no drafters, nor --resume")
        document = documents.merge([documents.read(file) for file in from_json])
        if path is not None:
            documents.write(path, document)
    else:
        models = model or [DEFAULT_MODEL]
        found = [_directory(drafter) for drafter in drafters or [str(default_drafter(m)) for m in models]]
        pairs = pair(found, [resolve(m) for m in models])
        plan = Plan(
            model_dir=next(iter(pairs)),
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
        given = sys.argv[2:] if sys.argv[1:2] == ["evaluate"] else sys.argv[1:]
        document = run(
            {replace(plan, model_dir=directory): entries for directory, entries in pairs.items()},
            " ".join(["paceline evaluate", *given]),
            threads=threads,
            latency_repeats=latency_repeats if latency else 0,
            path=path,
            resume=resume,
            console=console,
        )
    if path is not None:
        console.print(f"wrote {path}", highlight=False)
    _show(document, console, as_json=json_path == "-", as_markdown=as_markdown, plots=plots)


def _show(
    document: dict[str, Any], console: Console, *, as_json: bool, as_markdown: bool, plots: Path | None
) -> None:
    """Print and draw; fails where drafts changed a text."""
    from experiments.evaluation import picture
    from experiments.evaluation.report import caption, differing, heading, markdown, tables

    if as_json:
        typer.echo(json.dumps(document, indent=2))
    if as_markdown:
        typer.echo(markdown(document), nl=False)
    elif not as_json:
        shown = Console()
        shown.print(caption(document), highlight=False, markup=False)
        for target in document["targets"]:
            shown.rule(heading(target))
            for table in tables(target):
                shown.print(table)
    if plots is not None:
        for file in picture.draw(document, plots):
            console.print(f"wrote {file}", highlight=False)
    changed = list(differing(document))
    if changed:
        console.print(f"[bold]drafts changed the text:[/] {'; '.join(changed)}", highlight=False)
        raise typer.Exit(1)


def _directory(drafter: str) -> Path:
    from paceline.models import MODELS, resolve

    return resolve(drafter) if drafter in MODELS else Path(drafter)


def _temperatures(given: str) -> tuple[float, ...]:
    from paceline.contract.errors import InvalidRequestError

    try:
        found = tuple(float(part) for part in given.split(","))
    except ValueError:
        raise InvalidRequestError("temperatures", f"{given!r} are not numbers separated by commas") from None
    return tuple(dict.fromkeys(found))
