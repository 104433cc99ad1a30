"""A trained assistant's head, dense and in clusters, over the same held-out rows.

Responsible for the rows, for what each head proposes from them and how long it takes. Deliberately does not know: how
the figures are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from experiments.evaluation.figures import spread
from paceline.methods.checkpoint import DrafterConfig, read_all_tensors
from paceline.methods.gemma4_mtp.clustered_head import ClusteredHead
from paceline.methods.gemma4_mtp.layer import read_cached_layers, read_shape
from paceline.methods.gemma4_mtp.objective import TABLE, Gemma4MtpObjective, TargetTables
from paceline.methods.gemma4_mtp.token_clusters import cluster_tokens, fit_centroids
from paceline.methods.target_vocabulary import read_vocabulary
from paceline.target import Device, TapSpec
from paceline.training.acceptance import ChainAcceptance, chain_starts
from paceline.training.data import Batch, Corpus
from paceline.training.objective import TargetReference
from paceline.training.shards import shard_indices
from paceline.training.target_rows import TargetRows

CHAIN = 5
Head = Callable[[Tensor], Tensor]
"""Logits `[n, vocab]` of what the head reads, `[n, hidden]`."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What heads are compared on.

    Attributes:
        states: `[CHAIN, n, hidden]`, what the head reads at each step of a chain.
        wanted: int64 `[CHAIN, n]`, what the target chose there.
    """

    states: Tensor
    wanted: Tensor


@dataclass(frozen=True, slots=True)
class Figures:
    """One head.

    Attributes:
        num_selected: clusters that it scores; 0 for the dense head.
        mean_accepted: tokens accepted of a chain of `CHAIN`.
        agreement: share of rows where it proposes what the dense head does.
        times: microseconds of a call, median and quartiles, by rows in it.
    """

    num_selected: int
    mean_accepted: float
    agreement: float
    times: dict[int, dict[str, float]]


def load(
    drafter_dir: Path, target_dir: Path, dtype: torch.dtype
) -> tuple[Gemma4MtpObjective, dict[str, Tensor]]:
    """The assistant as it is trained, with a dense head, and its tensors as they are stored."""
    config, tensors = DrafterConfig.read(drafter_dir), read_all_tensors(drafter_dir)
    shape, cached = replace(read_shape(config), num_clusters=0, num_selected=0), read_cached_layers(config)
    embedding, head = read_vocabulary(target_dir, shape.vocab, shape.backbone, dtype)
    rows = TargetRows(target_dir, TapSpec(norm_final=True, cached=tuple(cached.values())), dtype)
    scale = float(config.shape.get("embedding_scale", shape.backbone**0.5))
    own = {name: tensors[name] for name in shape.parameter_shapes()}
    facts = TargetReference(config.target_fingerprint, config.target_name, (), config.size("max_positions"))
    tables = TargetTables(embedding, scale, head, rows)
    return Gemma4MtpObjective(shape, cached, own, tables, facts, dtype=dtype), tensors


@torch.no_grad()
def rows_of(
    assistant: Gemma4MtpObjective, folder: Path, batch_tokens: int, max_rows: int, *, greedy_only: bool = True
) -> Rows:
    """Chains from answer positions of texts, at most so many; of greedily answered ones where their tokens matter."""
    states: list[Tensor] = []
    wanted: list[Tensor] = []
    corpus, count = Corpus(folder, batch_tokens, 1, greedy_only=greedy_only, with_features=False), 0
    for batch in corpus.epoch(0, shard_indices(folder)):
        found = _chains(assistant, batch)
        if found is not None:
            states.append(found.states)
            wanted.append(found.wanted)
            count += found.wanted.shape[1]
        if count >= max_rows:
            break
    if not count:
        raise ValueError(f"{folder.name!r} has no greedily answered text of {CHAIN + 2} tokens")
    return Rows(torch.cat(states, dim=1)[:, :max_rows], torch.cat(wanted, dim=1)[:, :max_rows])


def in_turn(states: Tensor) -> Tensor:
    """What the head reads at all steps alike, `[n, hidden]` of `[steps, n, hidden]`: the next chain at the next step.

    Later steps read the assistant's own states. Centroids fitted to first steps alone lose some of what those choose.
    """
    steps, count = states.shape[:2]
    return states[torch.arange(count) % steps, torch.arange(count)]


def _chains(assistant: Gemma4MtpObjective, batch: Batch) -> Rows | None:
    row, position = chain_starts(batch.is_greedy_answer, CHAIN).nonzero(as_tuple=True)
    if not row.numel():
        return None
    states = torch.stack([out[row, position] for out in assistant.outputs(batch, CHAIN)])
    wanted = torch.stack([batch.top_tokens[row, position + 1 + j] for j in range(CHAIN)])
    return Rows(states, wanted)


@torch.no_grad()
def compare(
    assistant: Gemma4MtpObjective,
    tensors: dict[str, Tensor],
    rows: Rows,
    selected: Sequence[int],
    num_clusters: int,
    batch_rows: Sequence[int],
    repeats: int,
    seen: Tensor | None = None,
) -> list[Figures]:
    """The dense head, then heads that score so many clusters.

    Args:
        assistant: gives the table.
        tensors: of the checkpoint; its clusters are taken where it has some, and made here where it has none.
        rows: held out.
        selected: clusters scored.
        num_clusters: of clusters made here.
        batch_rows: rows in a call, for its time.
        repeats: calls that are timed, of all heads in turn.
        seen: `[n, hidden]`, what the head read of other texts, at all steps: clusters made here get centroids fitted to
            it. None takes their means.
    """
    table = assistant.named_parameters()[TABLE].detach().to(assistant.dtype)
    if "masked_embedding.centroids.weight" in tensors:
        centroids, order = (
            tensors[f"masked_embedding.{name}"] for name in ("centroids.weight", "token_ordering")
        )
    else:
        centroids, order = cluster_tokens(table, num_clusters)
        if seen is not None:
            centroids = fit_centroids(seen, table, order, num_clusters)
    centroids = centroids.to(assistant.dtype)
    dense: Head = Device.parse("cpu").pack(table)
    heads: dict[int, Head] = {0: dense}
    heads |= {
        count: ClusteredHead(centroids, order, table, count).logits
        for count in selected
        if count <= centroids.shape[0]
    }
    times = _times(heads, rows.states[0], batch_rows, repeats)
    best = _best(dense, rows.states)
    found = []
    for count, head in heads.items():
        proposed = best if head is dense else _best(head, rows.states)
        accepted = ChainAcceptance.from_chains((proposed == rows.wanted).T)
        agreement = float((proposed == best).float().mean())
        found.append(Figures(count, accepted.mean_accepted, agreement, times[count]))
    return found


def _best(head: Head, states: Tensor) -> Tensor:
    """`[steps, n]`, a few rows at a time: a row of logits may have a quarter of a million numbers."""
    return torch.stack([torch.cat([head(part).argmax(-1) for part in step.split(64)]) for step in states])


def _times(
    heads: dict[int, Head], states: Tensor, batch_rows: Sequence[int], repeats: int
) -> dict[int, dict[int, dict[str, float]]]:
    """Microseconds of finding the best token of each row, by head and rows; a slow moment meets all heads."""
    times: dict[int, dict[int, list[float]]] = {count: {size: [] for size in batch_rows} for count in heads}
    for repeat in range(repeats + 1):  # the first warms up
        for size in batch_rows:
            for count, head in heads.items():
                started = time.perf_counter()
                head(states[:size]).argmax(-1)
                if repeat:
                    times[count][size].append(1e6 * (time.perf_counter() - started))
    return {
        count: {size: found for size, values in by_size.items() if (found := spread(values)) is not None}
        for count, by_size in times.items()
    }
