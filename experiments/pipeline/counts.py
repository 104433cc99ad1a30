"""Counters of the processes: how much they changed while something ran."""

from __future__ import annotations

from dataclasses import dataclass, fields

from experiments.metrics_page import read_page, samples_of


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals since the processes started, or the difference of two such.

    Attributes:
        step_s: time in which the target computed and committed.
        draft_wait_s: time in which steps waited for drafts.
        num_steps: steps.
        num_drafts: steps of a sequence with a draft token at least.
        num_draft_tokens: draft tokens verified.
        num_cache_hits: those of these steps behind which the trie went on already.
        draft_s: time in which the drafter drafted.
        num_draft_calls: calls of the drafter.
        link_bytes: bytes between conductor and drafter, both ways.
    """

    step_s: float = 0.0
    draft_wait_s: float = 0.0
    num_steps: float = 0.0
    num_drafts: float = 0.0
    num_draft_tokens: float = 0.0
    num_cache_hits: float = 0.0
    draft_s: float = 0.0
    num_draft_calls: float = 0.0
    link_bytes: float = 0.0

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def read_counts(verifier_url: str, drafter_url: str, link_bytes: int) -> Counts:
    """Reads the metrics of two processes.

    Raises:
        OSError: one does not answer.
    """
    verifier, drafter = _totals(verifier_url), _totals(drafter_url)
    return Counts(
        step_s=verifier.get("paceline_step_seconds_sum", 0.0),
        draft_wait_s=verifier.get("paceline_draft_wait_seconds_total", 0.0),
        num_steps=verifier.get("paceline_step_seconds_count", 0.0),
        num_drafts=verifier.get("vllm:spec_decode_num_drafts_total", 0.0),
        num_draft_tokens=verifier.get("vllm:spec_decode_num_draft_tokens_total", 0.0),
        num_cache_hits=verifier.get("paceline_speculation_cache_hits_total", 0.0),
        draft_s=drafter.get("paceline_draft_seconds_sum", 0.0),
        num_draft_calls=drafter.get("paceline_draft_seconds_count", 0.0),
        link_bytes=link_bytes,
    )


def _totals(url: str) -> dict[str, float]:
    """Each metric's sum over its labels."""
    totals: dict[str, float] = {}
    for sample in samples_of(read_page(url)):
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals
