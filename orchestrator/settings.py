"""Settings of the orchestrator process; the actors get a copy of them through Ray.

Read once by orchestrator.__main__; nothing below it looks at the environment.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from orchestrator.peer_link import StreamTiming
from orchestrator.placement import PlacementSetting
from orchestrator.sequence_lifecycle import Patience
from paceline.contract import limits
from paceline.contract.policy import PolicyOverrides
from services.runtime.channel import split_endpoint
from services.runtime.settings import CommaList, Port, ServerSettings

DraftLength = Annotated[int, Field(ge=0, le=limits.MAX_DRAFT_LENGTH)]
NumOutcomes = Annotated[int, Field(ge=0, le=limits.MAX_OUTCOMES)]
DraftNodes = Annotated[int, Field(ge=0, le=limits.MAX_DRAFT_NODES)]


class OrchestratorSettings(ServerSettings):
    """Settings of the orchestrator: director, conductors and Ray."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_ORCHESTRATOR_")

    port: Port = Field(50054, description="gRPC port of the director; 0 picks a free one")
    metrics_port: Port | None = Field(9104, description="Prometheus port; 0 picks a free one")
    verifiers: CommaList = Field(description="verifiers, host:port, separated by commas; one conductor each")
    drafters: CommaList = Field((), description="drafters, host:port, separated by commas")
    feature_endpoints: CommaList = Field(
        (),
        description="the verifiers as drafters reach them for features, in their order; absent: the same addresses",
    )
    scheduler: str | None = Field(
        None, description="scheduler, host:port; without one a fixed default policy holds"
    )
    drafters_per_sequence: int = Field(
        1,
        ge=1,
        le=limits.MAX_PARTITIONS,
        description="drafters that share the likely outcomes of one sequence's steps",
    )
    placement: PlacementSetting = Field(
        "auto",
        description="colocated, separate or none; auto: separate with drafters, else the verifier's own",
    )
    draft_length: DraftLength | None = Field(None, description="tokens per draft, in place of the policy's")
    draft_ahead: DraftLength | None = Field(
        None, description="tokens drafted ahead, in place of the policy's"
    )
    num_outcomes: NumOutcomes | None = Field(
        None, description="verification outcomes of a step that are drafted past, in place of the policy's"
    )
    wait_budget_us: int | None = Field(
        None,
        ge=0,
        le=limits.MAX_WAIT_BUDGET_US,
        description="longest time that a step waits for drafts, in place of the policy's",
    )
    max_nodes: DraftNodes | None = Field(
        None, description="draft nodes of one sequence in one step, in place of the policy's"
    )
    max_prefill_tokens_per_step: int = Field(
        limits.DEFAULT_PREFILL_TOKENS,
        ge=1,
        le=limits.MAX_PREFILL_TOKENS,
        description="prompt tokens in one step",
    )
    max_sequences: int = Field(
        limits.DEFAULT_MAX_SEQUENCES,
        ge=1,
        le=limits.MAX_SEQUENCES,
        description="most running requests per conductor",
    )
    lease_s: float = Field(
        15.0,
        ge=limits.MIN_LEASE_MS / 1000,
        le=limits.MAX_LEASE_MS / 1000,
        description="peers free our sequences after this long without a frame",
    )
    connect_timeout_s: float = Field(3.0, gt=0, le=60, description="deadline of a connection attempt")
    drafter_silence_s: float = Field(
        10.0, gt=0, le=600, description="a drafter whose answer is overdue for longer counts as hung"
    )
    verifier_silence_s: float = Field(
        60.0, gt=0, le=3600, description="a verifier without a step for longer counts as hung"
    )
    max_resumes: int = Field(5, ge=0, le=100, description="further openings of a request at a verifier")
    resume_timeout_s: float = Field(
        60.0, gt=0, le=3600, description="longest wait of a request for a verifier"
    )
    ray_address: str | None = Field(
        None, description="Ray cluster to join, host:port; absent: start one here"
    )
    ray_node_ip: str = Field("127.0.0.2", description="address of the Ray that is started here")
    ray_num_cpus: int = Field(1, ge=1, description="worker processes that the Ray started here keeps warm")
    advertise_host: str | None = Field(
        None, description="host by which clients reach the conductors on this node"
    )

    @field_validator("verifiers")
    @classmethod
    def _check_verifiers(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        if not endpoints or len(set(endpoints)) != len(endpoints):
            raise ValueError("at least one verifier, each once")
        return _checked(endpoints)

    @field_validator("drafters")
    @classmethod
    def _check_drafters(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(endpoints)) != len(endpoints):
            raise ValueError("each drafter once")
        return _checked(endpoints)

    @model_validator(mode="after")
    def _check_feature_endpoints(self) -> OrchestratorSettings:
        if self.feature_endpoints and len(self.feature_endpoints) != len(self.verifiers):
            raise ValueError("feature_endpoints: one for each verifier, or none")
        _checked(self.feature_endpoints)
        return self

    @field_validator("scheduler", "ray_address")
    @classmethod
    def _empty_is_absent(cls, endpoint: str | None) -> str | None:
        return endpoint or None

    def feature_endpoint(self, verifier: str) -> str:
        """Where drafters subscribe to a verifier's features."""
        return dict(zip(self.verifiers, self.feature_endpoints, strict=False)).get(verifier, verifier)

    @property
    def policy_overrides(self) -> PolicyOverrides:
        """The fields of the policy that the operator fixed."""
        return PolicyOverrides(
            draft_length=self.draft_length,
            draft_ahead=self.draft_ahead,
            wait_budget_us=self.wait_budget_us,
            max_prefill_tokens_per_step=self.max_prefill_tokens_per_step,
            max_nodes_per_sequence=self.max_nodes,
            num_outcomes=self.num_outcomes,
        )

    @property
    def patience(self) -> Patience:
        """Bounds on recovery."""
        return Patience(self.max_resumes, self.resume_timeout_s)

    def timing(self, silence_s: float) -> StreamTiming:
        """Times of a stream to a peer that may be silent for `silence_s`."""
        return StreamTiming(
            connect_timeout_s=self.connect_timeout_s,
            lease_s=self.lease_s,
            heartbeat_s=self.lease_s / 5,
            silence_s=silence_s,
        )


def _checked(endpoints: tuple[str, ...]) -> tuple[str, ...]:
    for endpoint in endpoints:
        split_endpoint(endpoint)
    return endpoints
