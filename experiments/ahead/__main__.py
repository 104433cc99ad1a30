"""`python -m experiments.ahead`: hit rates and acceptance of drafting past outcomes, as JSON and as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.atomic_write import write_json


def ahead(
    model: Annotated[str, typer.Option(help="Name of a fetched model or a directory.")] = "smollm2-135m",
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter checkpoint; the shipped one by default.")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path(
        "ahead.json"
    ),
    prompts: Annotated[int, typer.Option(min=1, help="Embedded prompts.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=16, help="Tokens per text.")] = 128,
    draft_length: Annotated[int, typer.Option(min=1, help="Tokens in a row.")] = 4,
    max_nodes: Annotated[int, typer.Option(min=1, help="Nodes of a draft.")] = 7,
    tokens_ahead: Annotated[int, typer.Option(min=1, help="Tokens behind each outcome.")] = 4,
    outcomes: Annotated[str, typer.Option(help="Outcomes, separated by commas.")] = "1,2,4,8,16",
    temperatures: Annotated[str, typer.Option(help="Separated by commas; 0 is greedy.")] = "0,0.8",
    seed: Annotated[int, typer.Option(help="Of the first prompt; the next one's is one more.")] = 1,
) -> None:
    """Follow texts that the target has written, drafting past outcomes, and count what was foretold and accepted."""
    import torch
    from transformers import AutoTokenizer

    from experiments.ahead.replay import Cycle, Tally, replay
    from experiments.ahead.text import write
    from experiments.bench.prompts import embedded_prompts, token_ids
    from paceline.methods.loading import default_drafter, drafter_tap, load_drafter
    from paceline.models import resolve
    from paceline.sampling.params import SamplingParams
    from paceline.target import TargetEngine, configure_threads

    configure_threads(1)
    console = Console(stderr=True)
    model_dir, drafter_dir = resolve(model), drafter or default_drafter(model)
    tap = drafter_tap(drafter_dir)
    engine = TargetEngine.load(model_dir, "cpu", torch.bfloat16, taps=[] if tap is None else [tap])
    drafting = load_drafter(drafter_dir, model_dir, dtype=torch.bfloat16)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    rows = []
    for temperature in map(float, temperatures.split(",")):
        texts = []
        for which, prompt in enumerate(embedded_prompts(prompts)):
            console.log(f"T = {temperature:g}: {prompt.prompt_id}")
            ids = token_ids(tokenizer, prompt.text)
            sampling = SamplingParams(temperature, seed=seed + which)
            texts.append(write(engine, ids, sampling, max_tokens, frozenset({tokenizer.eos_token_id})))
        for count in map(int, outcomes.split(",")):
            tally = Tally()
            for text in texts:
                replay(drafting, text, Cycle(draft_length, max_nodes, count, tokens_ahead), tally)
            rows.append(
                {
                    "temperature": temperature,
                    "outcomes": count,
                    "num_cycles": tally.num_cycles,
                    "tokens_per_pass": round(tally.num_tokens / tally.num_cycles, 3),
                    "hit_rate": round(tally.num_cache_hits / tally.num_cycles, 3),
                    "accepted_ahead": round(tally.num_ahead / max(tally.num_cache_hits, 1), 3),
                    "accepted_fresh": round(tally.num_fresh / max(tally.num_cache_hits, 1), 3),
                    "ahead_at": tally.ahead_at,
                    "fresh_at": tally.fresh_at,
                }
            )
    report = {
        "command": " ".join(["python -m experiments.ahead", *sys.argv[1:]]),
        "method": drafting.method,
        "results": rows,
    }
    write_json(json_path, report)
    typer.echo(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """One row for each temperature and number of outcomes."""
    lines = [
        "| T | outcomes | tokens a pass | hit rate | accepted behind a hit, on own states | from true features there |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["results"]:
        names = ("outcomes", "tokens_per_pass", "hit_rate", "accepted_ahead", "accepted_fresh")
        cells = [f"{row['temperature']:g}", *(f"{row[name]:g}" for name in names)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(ahead)
