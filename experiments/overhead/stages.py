"""Where the time of a verifier's steps goes, read off its metrics around some generations.

Deliberately does not know: deployments, prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.metrics_page import read_page, samples_of
from services.verifier.stopwatch import OVERHEAD, StepStage

_STAGES, _STEPS, _ACCEPTED = (
    "paceline_step_stage_seconds_total",
    "paceline_step_seconds_count",
    "vllm:spec_decode_num_accepted_tokens_total",
)


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the process started, or between two such moments.

    Attributes:
        num_steps: passes of the target.
        num_accepted: draft tokens that were accepted.
        seconds: by stage.
    """

    num_steps: float
    num_accepted: float
    seconds: Mapping[StepStage, float]

    def since(self, earlier: Totals) -> Totals:
        """What has come since an earlier moment."""
        return Totals(
            self.num_steps - earlier.num_steps,
            self.num_accepted - earlier.num_accepted,
            {stage: seconds - earlier.seconds[stage] for stage, seconds in self.seconds.items()},
        )

    def ms_per_step(self, *stages: StepStage) -> float:
        """Milliseconds of some stages in the mean step."""
        return 1e3 * sum(self.seconds[stage] for stage in stages) / max(self.num_steps, 1.0)

    @property
    def overhead_ms(self) -> float:
        """Between two passes, without waits and drafts: the target stands still for it."""
        return self.ms_per_step(*OVERHEAD)


def read_totals(url: str) -> Totals:
    """Totals of a verifier.

    Raises:
        OSError: it does not answer.
    """
    return parse_totals(read_page(url))


def parse_totals(text: str) -> Totals:
    """Totals from what a verifier's metrics endpoint says."""
    seconds = dict.fromkeys(StepStage, 0.0)
    counts = {_STEPS: 0.0, _ACCEPTED: 0.0}
    for sample in samples_of(text):
        if sample.name == _STAGES:
            seconds[StepStage(sample.labels["stage"])] += sample.value
        elif sample.name in counts:
            counts[sample.name] += sample.value
    return Totals(counts[_STEPS], counts[_ACCEPTED], seconds)
