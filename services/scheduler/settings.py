"""Settings of the scheduler process."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from paceline.contract import limits
from services.runtime.settings import OptionalPort, Port, ServerSettings
from services.scheduler.planning import PlanningLimits


class SchedulerSettings(ServerSettings):
    """Settings of the process that collects measurements, stores them in Redis and publishes policies."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_SCHEDULER_")

    port: Port = Field(50053, description="gRPC port; 0 picks a free one")
    metrics_port: OptionalPort = Field(9103, description="Prometheus port; 0 picks a free one, off for none")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="redis://, rediss:// or unix:// URL; empty keeps state in memory only",
    )
    redis_username: str | None = Field(None, description="Redis ACL user, where the URL names none")
    redis_password_file: Path | None = Field(None, description="file with the Redis password")
    redis_ca: Path | None = Field(None, description="PEM authorities for rediss://")
    redis_timeout_s: float = Field(1.0, gt=0, le=60, description="time limit of each Redis operation")
    ttl_s: float = Field(
        7 * 86400.0, ge=1, description="how long Redis keeps a measurement that is not refreshed"
    )
    plan_interval_s: float = Field(0.5, gt=0, le=60, description="pause between decisions")
    flush_interval_s: float = Field(1.0, gt=0, le=60, description="pause between writes to Redis")
    refresh_interval_s: float = Field(
        10.0, gt=0, le=3600, description="pause between reads of what other schedulers wrote"
    )
    max_subjects: int = Field(256, ge=1, le=4096, description="subjects kept in memory")
    max_draft_length: int = Field(
        8, ge=1, le=limits.MAX_DRAFT_LENGTH, description="longest draft that is ever requested"
    )
    max_nodes_per_sequence: int = Field(
        32, ge=1, le=limits.MAX_DRAFT_NODES, description="most draft nodes of a sequence in a step"
    )
    max_nodes_per_step: int = Field(
        256, ge=1, le=limits.MAX_STEP_NODES, description="most draft nodes over all sequences of a step"
    )
    max_wait_ms: float = Field(
        50.0,
        ge=0,
        le=limits.MAX_WAIT_BUDGET_US / 1000,
        description="longest wait of a step for drafts that are due",
    )
    margin: float = Field(
        0.05, ge=0, le=1, description="speculation must be faster than plain decoding by this fraction"
    )
    concurrent_slowdown: float = Field(
        0.0,
        ge=0,
        le=10,
        description="fraction by which a step takes longer while a drafter works on the same machine",
    )
    max_outcomes: int = Field(
        8,
        ge=0,
        le=limits.MAX_OUTCOMES,
        description="most verification outcomes that drafters draft past during a step; 0 for none",
    )
    outcome_cost: float = Field(
        1.0,
        ge=0,
        le=1,
        description="time that each further outcome adds, as a fraction of the first one's: 0 where all run in one "
        "batch at no extra cost, 1 where they run one after another",
    )
    cold_draft_length: int = Field(
        limits.DEFAULT_DRAFT_LENGTH,
        ge=0,
        le=limits.MAX_DRAFT_LENGTH,
        description="draft length until enough is measured",
    )
    probe_interval_s: float = Field(
        10.0, gt=0, description="pause before a probe of speculation that did not pay"
    )
    probe_duration_s: float = Field(1.0, gt=0, description="how long a probe lasts")

    @property
    def planning_limits(self) -> PlanningLimits:
        """Bounds of every plan."""
        return PlanningLimits(
            max_draft_length=self.max_draft_length,
            max_nodes_per_sequence=self.max_nodes_per_sequence,
            max_nodes_per_step=self.max_nodes_per_step,
            max_wait_s=self.max_wait_ms / 1000,
            margin=self.margin,
            concurrent_slowdown=self.concurrent_slowdown,
            max_outcomes=self.max_outcomes,
            outcome_cost=self.outcome_cost,
            cold_draft_length=self.cold_draft_length,
            probe_interval_s=self.probe_interval_s,
            probe_duration_s=self.probe_duration_s,
        )
