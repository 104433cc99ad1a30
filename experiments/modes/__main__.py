"""`python -m experiments.modes`: acceptance and bytes of every verification mode, as JSON and as a Markdown table."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.decoding.arm import Arm
from experiments.modes.arm import ARMS, GREEDY_ARMS, SUPPORT_ARMS
from paceline.atomic_write import write_json, write_text


def modes(
    model: Annotated[str, typer.Option(help="Name of a fetched model or a directory.")] = "smollm2-135m",
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter checkpoint; the shipped one by default.")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path(
        "modes.json"
    ),
    prompts: Annotated[int, typer.Option(min=1, help="Embedded prompts.")] = 20,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds over the prompts, each with seeds of its own.")
    ] = 1,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per generation.")] = 64,
    draft_length: Annotated[int, typer.Option(min=1, help="Tokens in a row.")] = 5,
    max_nodes: Annotated[int, typer.Option(min=1, help="Nodes of a draft that branches.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the first prompt; the next one's is one more.")] = 1,
    temperatures: Annotated[str, typer.Option(help="Separated by commas; 0 is greedy.")] = "0,0.6,0.8,1.0",
    arm: Annotated[
        list[str] | None,
        typer.Option(help="Part of a row's name, to measure such rows alone; may be given again."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Generate with every mode and count what was accepted and what a drafted token takes on the wire."""
    import torch
    from transformers import AutoTokenizer

    from experiments.bench.prompts import embedded_prompts, token_ids
    from experiments.decoding.generation import generate
    from experiments.decoding.tally import Tally
    from experiments.modes.table import markdown
    from paceline.methods.loading import default_drafter, drafter_tap, load_drafter
    from paceline.models import resolve
    from paceline.sampling.params import SamplingParams
    from paceline.target import TargetEngine, configure_threads

    configure_threads(threads)
    console = Console(stderr=True)
    model_dir, drafter_dir = resolve(model), drafter or default_drafter(model)
    tap = drafter_tap(drafter_dir)
    engine = TargetEngine.load(model_dir, "cpu", torch.bfloat16, taps=[] if tap is None else [tap])
    drafting = load_drafter(drafter_dir, model_dir, dtype=torch.bfloat16)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    prompt_ids = [token_ids(tokenizer, prompt.text) for prompt in embedded_prompts(prompts)]
    wanted = [float(temperature) for temperature in temperatures.split(",")]
    plan: list[tuple[float, Arm]] = [
        (temperature, row) for temperature in wanted for row in (ARMS if temperature else GREEDY_ARMS)
    ]
    plan += [(wanted[-1], row) for row in SUPPORT_ARMS if wanted[-1]]
    if arm:
        plan = [(temperature, row) for temperature, row in plan if any(part in row.name for part in arm)]
    report: dict[str, Any] = {
        "command": " ".join(["python -m experiments.modes", *sys.argv[1:]]),
        "model": model,
        "drafter": drafter_dir.name,
        "dtype": "bfloat16",
        "draft_length": draft_length,
        "max_nodes": max_nodes,
        "max_tokens": max_tokens,
        "num_prompts": len(prompt_ids),
        "rounds": rounds,
        "seed": seed,
        "results": (results := []),
    }
    json_path.parent.mkdir(parents=True, exist_ok=True)
    with console.status("") as status:
        for temperature, row in plan:
            status.update(f"{row.name} at {temperature}")
            tally = Tally()
            sampling = SamplingParams(temperature=temperature, mode=row.mode)
            for index, prompt in enumerate(prompt_ids * rounds):
                generate(
                    engine,
                    drafting,
                    prompt,
                    row,
                    replace(sampling, seed=seed + index),
                    draft_length=draft_length,
                    max_nodes=max_nodes,
                    max_tokens=max_tokens,
                    stop_token_ids=frozenset({tokenizer.eos_token_id}),
                    watch=tally.add,
                )
            results.append(
                {
                    "arm": row.name,
                    "mode": row.mode.value,
                    "exact": row.mode.is_exact,
                    "temperature": temperature,
                    "support_size": row.support_size,
                    "tokens_per_pass": round(tally.tokens_per_pass, 4),
                    "standard_error": round(tally.standard_error, 4),
                    "acceptance_per_position": [round(a, 4) for a in tally.acceptance_per_position],
                    "bytes_per_token": round(tally.bytes_per_token, 2),
                    "num_passes": tally.num_passes,
                    "num_tokens": tally.num_tokens,
                }
            )
            console.print(
                f"{temperature:g}  {row.name}: {tally.tokens_per_pass:.3f} +- {tally.standard_error:.3f}",
                highlight=False,
            )
            write_json(json_path, report)  # after each arm: a run takes a while
            write_text(json_path.with_suffix(".md"), markdown(report))
    console.print(f"wrote {json_path} and {json_path.with_suffix('.md')}")


if __name__ == "__main__":
    typer.run(modes)
