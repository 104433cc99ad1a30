"""What one generation measured, and what many of them come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Sample:
    """One generation.

    Attributes:
        token_ids: what was generated.
        elapsed_s: from the request to its end, at the client's clock.
        ttft_s: from the request to its first token, at the client's clock.
        num_passes: target passes that committed tokens.
    """

    token_ids: tuple[int, ...]
    elapsed_s: float
    ttft_s: float
    num_passes: int
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the whole time, the prompt's included."""
        return len(self.token_ids) / self.elapsed_s


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one mode: medians over generations, with the smallest and largest beside them."""

    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    tokens_per_pass: float
    ttft_ms: float
    ttft_ms_min: float
    ttft_ms_max: float
    num_generations: int
    num_tokens: int
    acceptance_per_position: list[float]

    def as_dict(self) -> dict[str, object]:
        """Plain values, rounded for people."""
        return {
            key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()
        }


def summarise(samples: Sequence[Sample]) -> Summary:
    """Summarise the generations of one mode.

    Raises:
        ValueError: there are none.
    """
    if not samples:
        raise ValueError("no generation was measured")
    speeds = [sample.tokens_per_s for sample in samples]
    first = [sample.ttft_s * 1000 for sample in samples]
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    drafted = _columns([sample.drafted_per_position for sample in samples])
    accepted = _columns([sample.accepted_per_position for sample in samples])
    return Summary(
        tokens_per_s=median(speeds),
        tokens_per_s_min=min(speeds),
        tokens_per_s_max=max(speeds),
        tokens_per_pass=num_tokens / max(1, sum(sample.num_passes for sample in samples)),
        ttft_ms=median(first),
        ttft_ms_min=min(first),
        ttft_ms_max=max(first),
        num_generations=len(samples),
        num_tokens=num_tokens,
        acceptance_per_position=[round(a / d, 4) for a, d in zip(accepted, drafted, strict=False) if d],
    )


def paired_ratio(numerator: Sequence[Sample], denominator: Sequence[Sample]) -> dict[str, float]:
    """Speed of one mode over another, generation by generation: median, smallest and largest.

    Generations are paired in the order they were measured, so that each pair ran close together and the machine's
    drift cancels.
    """
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(numerator, denominator, strict=True)]
    return {"median": round(median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3)}


def _columns(rows: Sequence[Sequence[int]]) -> list[int]:
    width = max((len(row) for row in rows), default=0)
    return [sum(row[place] for row in rows if place < len(row)) for place in range(width)]
