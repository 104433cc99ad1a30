"""`python -m experiments.modes.first_token`: acceptance at the first drafted position, as an exact expectation.

For every position of texts that the target writes, both distributions are computed, and from them what each rule
accepts on average over its draws. Nothing is sampled but the texts, so that small differences show, such as between
sizes of the support that a drafter draws from.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from experiments.modes.arm import ARMS
from paceline.atomic_write import write_json
from paceline.methods.drafter import DraftRequest
from paceline.sampling.distribution import DraftDistribution
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.probabilities import target_probs
from paceline.sampling.row_params import RowParams
from paceline.target import SequenceRows

SIZES = (4, 8, 16, 32, 64, 256)


def acceptance(target: Tensor, dist: DraftDistribution) -> dict[str, float]:
    """What each rule accepts on average at one position.

    Args:
        target: [vocab] float64: the target's distribution.
        dist: the drafter's, likeliest first.
    """
    wanted = target[dist.token_ids]  # [support]
    out = {}
    for size in SIZES:
        drawn = dist.probs[:size] / dist.probs[:size].sum()
        out[f"drawn from {size}"] = float(torch.minimum(wanted[:size], drawn).sum())
    out["likeliest"] = float(wanted[0])
    out["two likeliest"] = float(wanted[:2].sum())
    out["two drawn from 32"] = _two_drawn(
        target, dist.token_ids[:32], dist.probs[:32] / dist.probs[:32].sum()
    )
    out["coupled"] = _coupled(wanted, dist.probs)
    return out


def _two_drawn(target: Tensor, ids: Tensor, drawn: Tensor) -> float:
    """Without replacement: the first draw's overlap, then the second's with what is left of both."""
    wanted = target[ids]
    overlap = torch.minimum(wanted, drawn).sum()
    if float(overlap) >= 1:
        return 1.0
    left = (wanted - drawn).clamp(min=0) / (1 - overlap)  # [support]: the target's after one refusal
    refused = (drawn - wanted).clamp(min=0)  # probability that this token is drawn and refused
    second = drawn.expand(len(ids), -1).clone().fill_diagonal_(0)  # [first draw, support]
    second = second / second.sum(dim=-1, keepdim=True).clamp(min=1e-300)
    return float(overlap + (refused * torch.minimum(left, second).sum(dim=-1)).sum())


def _coupled(wanted: Tensor, drawn: Tensor) -> float:
    """P(match) = sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x)) (Daliri et al., arXiv 2408.07978)."""
    both = (wanted > 0) & (drawn > 0)
    outside = 1 - wanted.sum()
    ratios = torch.maximum(wanted / wanted[both, None], drawn / drawn[both, None]).sum(dim=-1)
    return float((1 / (ratios + outside / wanted[both])).sum())


def first_token(
    model: Annotated[str, typer.Option(help="Name of a fetched model or a directory.")] = "smollm2-135m",
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path(
        "first_token.json"
    ),
    prompts: Annotated[int, typer.Option(min=1, help="Embedded prompts.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each text.")] = 48,
    seed: Annotated[int, typer.Option(help="Of the first text; the next one's is one more.")] = 1,
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0.6,0.8,1.0",
) -> None:
    """Compute what each rule accepts at the first drafted position of texts that the target writes."""
    from transformers import AutoTokenizer

    from experiments.bench.prompts import embedded_prompts, token_ids
    from experiments.decoding.generation import generate
    from paceline.methods.loading import default_drafter, drafter_tap, load_drafter
    from paceline.models import resolve
    from paceline.target import TargetEngine, configure_threads

    configure_threads(1)
    model_dir, drafter_dir = resolve(model), default_drafter(model)
    tap = drafter_tap(drafter_dir)
    engine = TargetEngine.load(model_dir, "cpu", torch.bfloat16, taps=[] if tap is None else [tap])
    drafter = load_drafter(drafter_dir, model_dir, dtype=torch.bfloat16)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    wanted = [float(temperature) for temperature in temperatures.split(",")]
    sums: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    num_positions = 0
    for index, prompt in enumerate(embedded_prompts(prompts)):
        ids = token_ids(tokenizer, prompt.text)
        sampling = SamplingParams(temperature=0.8, seed=seed + index, mode=VerifyMode.COUPLED)
        text = generate(
            engine,
            drafter,
            ids,
            ARMS[0],
            sampling,
            draft_length=5,
            max_nodes=5,
            max_tokens=max_tokens,
            stop_token_ids=frozenset({tokenizer.eos_token_id}),
        )
        with torch.inference_mode():
            slot = engine.open(len(ids) + len(text))
            whole = [*ids, *text]
            rows = range(len(ids) - 1, len(whole))
            output = engine.step([SequenceRows(slot, whole, num_logits=rows)])
            for which in range(len(wanted)):
                drafter.open(which, ids)
            for place in range(len(text)):
                known = len(ids) + place
                requests = []
                for which, temperature in enumerate(wanted):
                    if place:
                        drafter.extend(which, known - 1, whole[known - 1 : known])
                    if drafter.tap is not None:
                        drafter.feed(which, 0, output.features[0][: known - 1])
                    params = SamplingParams(temperature=temperature, seed=seed, mode=VerifyMode.REJECTION)
                    requests.append(DraftRequest(which, 1, 1, params, support_size=max(SIZES)))
                for request, entry in zip(requests, drafter.draft(requests), strict=True):
                    assert entry is not None
                    assert entry.draft_dists is not None
                    assert entry.draft_dists[0] is not None
                    dist = entry.draft_dists[0].distribution
                    assert isinstance(dist, DraftDistribution)
                    logits = output.logits[0][place : place + 1]
                    (target,) = target_probs(logits, RowParams.build([request.sampling], [1]))
                    for name, value in acceptance(target, dist).items():
                        sums[name][request.sampling.temperature] += value
                num_positions += 1
            for which in range(len(wanted)):
                drafter.close(which)
            engine.close(slot)
    rates = {name: {t: round(s / num_positions, 4) for t, s in by.items()} for name, by in sums.items()}
    write_json(json_path, {"num_positions": num_positions, "acceptance": rates})
    console = Console(highlight=False)
    console.print(f"| {num_positions} positions | " + " | ".join(f"T = {t:g}" for t in wanted) + " |")
    console.print("|---|" + "---:|" * len(wanted))
    for name, by in rates.items():
        console.print(f"| {name} | " + " | ".join(f"{by[t]:.3f}" for t in wanted) + " |")


if __name__ == "__main__":
    typer.run(first_token)
