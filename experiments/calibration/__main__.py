"""`python -m experiments.calibration`: calibration error of a drafter on held-out prompts, before and after."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from experiments.calibration.outcomes import Recording, held_out_errors
from experiments.decoding.arm import Arm
from paceline.atomic_write import write_json


def calibration(
    model: Annotated[str, typer.Option(help="Name of a fetched model or a directory.")] = "smollm2-135m",
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter checkpoint; the shipped one by default.")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path(
        "calibration.json"
    ),
    outcomes: Annotated[
        Path | None, typer.Option(help="Where to write what was recorded, for a replay.")
    ] = None,
    replay: Annotated[Path | None, typer.Option(help="Replay such a file, and generate nothing.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Generations of each prompt at a temperature.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per generation.")] = 200,
    draft_length: Annotated[int, typer.Option(min=1, help="Tokens in a row.")] = 5,
    max_nodes: Annotated[int, typer.Option(min=1, help="Nodes of a draft.")] = 12,
    temperature: Annotated[float, typer.Option(help="Beside greedy.")] = 0.8,
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Record outcomes greedily and coupled, learn on two thirds of the prompts and measure on the others."""
    console = Console(stderr=True)
    if replay is not None:
        stored = json.loads(replay.read_text())
        recorded = {
            name: [Recording.from_list(value) for value in by_prompt] for name, by_prompt in stored.items()
        }
    else:
        recorded = _record(
            console, model, drafter, rounds, max_tokens, draft_length, max_nodes, temperature, threads
        )
    if outcomes is not None:
        values = {
            name: [recording.to_list() for recording in by_prompt] for name, by_prompt in recorded.items()
        }
        write_json(outcomes, values, indent=None, separators=(",", ":"))
    report: dict[str, Any] = {"command": " ".join(["python -m experiments.calibration", *sys.argv[1:]])}
    table = Table("mode", "trials", "token before", "token after", "floor", "path before", "path after")
    for name, by_prompt in recorded.items():
        errors = held_out_errors(by_prompt)
        report[name] = dataclasses.asdict(errors)
        shares = (errors.own, errors.token, errors.floor, errors.own_path, errors.path)
        table.add_row(name, str(errors.num_trials), *(f"{share:.1%}" for share in shares))
    write_json(json_path, report)
    Console().print(table)


def _record(
    console: Console,
    model: str,
    drafter: Path | None,
    rounds: int,
    max_tokens: int,
    draft_length: int,
    max_nodes: int,
    temperature: float,
    threads: int,
) -> dict[str, list[Recording]]:
    """Outcomes by mode, then by prompt."""
    import torch
    from transformers import AutoTokenizer

    from experiments.bench.prompts import embedded_prompts, token_ids
    from experiments.decoding.generation import generate
    from paceline.methods.loading import default_drafter, drafter_tap, load_drafter
    from paceline.models import resolve
    from paceline.sampling.params import SamplingParams, VerifyMode
    from paceline.target import TargetEngine, configure_threads

    configure_threads(threads)
    model_dir, drafter_dir = resolve(model), drafter or default_drafter(model)
    tap = drafter_tap(drafter_dir)
    engine = TargetEngine.load(model_dir, "cpu", torch.bfloat16, taps=[] if tap is None else [tap])
    drafting = load_drafter(drafter_dir, model_dir, dtype=torch.bfloat16)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    recorded: dict[str, list[Recording]] = {}
    plan = ((VerifyMode.GREEDY, 0.0, 1), (VerifyMode.COUPLED, temperature, rounds))
    with console.status("") as status:
        for mode, heat, num_rounds in plan:
            by_prompt = recorded[mode.value] = []
            for index, prompt in enumerate(embedded_prompts()):
                status.update(f"{mode.value}: {prompt.prompt_id}")
                recording = Recording()
                by_prompt.append(recording)
                ids = token_ids(tokenizer, prompt.text)
                for turn in range(num_rounds):
                    generate(
                        engine,
                        drafting,
                        ids,
                        Arm(mode.value, mode, branches=True),
                        SamplingParams(temperature=heat, mode=mode, seed=1 + index + 1000 * turn),
                        draft_length=draft_length,
                        max_nodes=max_nodes,
                        max_tokens=max_tokens if heat else 2 * max_tokens,
                        stop_token_ids=frozenset({tokenizer.eos_token_id}),
                        watch=recording.watch,
                    )
    return recorded


if __name__ == "__main__":
    typer.run(calibration)
