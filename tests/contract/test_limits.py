"""Numbers in the protos' comments and in the settings are those of `paceline.contract.limits`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import annotated_types
import pytest
from pydantic import BaseModel

from orchestrator.settings import OrchestratorSettings
from paceline.contract import limits
from paceline.contract.policy import PolicyOverrides, SpeculationPolicy, StepPolicy, step_policy
from services.drafter.settings import DrafterSettings
from services.scheduler.settings import SchedulerSettings
from services.verifier.settings import VerifierSettings

PROTOS = sorted((Path(__file__).parents[2] / "protos/paceline/v1").glob("*.proto"))

RANGES: dict[str, set[float]] = {
    "SamplingParams.temperature": {limits.MAX_TEMPERATURE},
    "SamplingParams.repetition_penalty": {limits.MAX_REPETITION_PENALTY},
    "SamplingParams.presence_penalty": {-limits.MAX_PENALTY, limits.MAX_PENALTY},
    "SamplingParams.frequency_penalty": {-limits.MAX_PENALTY, limits.MAX_PENALTY},
    "SamplingParams.logit_bias": {limits.MAX_BIASES, -limits.MAX_BIAS, limits.MAX_BIAS},
    "SamplingParams.bad_runs": {limits.MAX_BAD_RUNS, limits.MAX_BAD_RUN_TOKENS},
    "SamplingParams.typical_epsilon": {limits.DEFAULT_TYPICAL_EPSILON},
    "SamplingParams.typical_delta": {limits.DEFAULT_TYPICAL_DELTA},
    "ChoiceList.texts": {limits.MAX_CONSTRAINT_CHOICES},
    "LogProbOptions.num_top": {limits.MAX_TOP_LOG_PROBS},
    "LogProbOptions.num_prompt_top": {limits.MAX_TOP_LOG_PROBS},
    "StopCondition.text": {limits.MAX_STOP_TEXT_BYTES},
    "SpeculationOptions.max_draft_tokens": {limits.MAX_DRAFT_LENGTH},
    "SpeculationOptions.drafter": {limits.MAX_DRAFTER_CHARACTERS},
    "ChatPrompt.messages": {limits.MAX_MESSAGES},
    "GenerateRequest.max_tokens": {limits.DEFAULT_MAX_TOKENS},
    "GenerateRequest.stop": {limits.MAX_STOP_CONDITIONS},
    "GenerateRequest.n": {limits.MAX_COMPLETIONS},
    "GenerateRequest.bad_words": {limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_BYTES},
    "GenerateRequest.stream_interval": {limits.MAX_STREAM_INTERVAL},
    "GenerateRequest.tenant": {limits.MAX_TENANT_CHARACTERS},
    "RunRequest.request_id": {limits.MAX_REQUEST_ID_CHARACTERS},
    "RunRequest.stop_token_ids": {limits.MAX_STOP_TOKENS},
    "RunRequest.stream_interval": {limits.MAX_STREAM_INTERVAL},
    "OpenSequence.stop_token_ids": {limits.MAX_STOP_TOKENS},
    "OpenSequence.max_draft_nodes": {limits.MAX_DRAFT_NODES},
    "OpenDraftSequence.max_draft_tokens": {limits.MAX_DRAFT_LENGTH},
    "OpenDraftSequence.num_partitions": {limits.MAX_PARTITIONS},
    "StreamHello.lease_ms": {limits.MIN_LEASE_MS, limits.MAX_LEASE_MS},
    "DraftBatch.sizes": {limits.MAX_DRAFT_LENGTH},
    "DraftBatch.support_sizes": {limits.MAX_SUPPORT_TOKENS},
    "DraftBatch.support_confidences": {limits.MAX_SUPPORT_CONFIDENCE},
    "ReportRequest.drafted_per_position": {limits.MAX_DRAFT_LENGTH},
    "ReportRequest.peers": {limits.MAX_PEER_PAIRS},
    "ReportRequest.acceptance": {limits.MAX_REPORTED_DRAFTERS},
    "ReportRequest.tenants": {limits.MAX_TENANTS + 1},
    "TenantUse.tenant": {limits.MAX_TENANTS},
} | {
    f"{policy}.{field}": {most}
    for policy in ("StepPolicy", "SpeculationPolicy")
    for field, most in {
        "draft_length": limits.MAX_DRAFT_LENGTH,
        "draft_ahead": limits.MAX_DRAFT_LENGTH,
        "num_outcomes": limits.MAX_OUTCOMES,
        "max_nodes_per_sequence": limits.MAX_DRAFT_NODES,
        "max_nodes_per_step": limits.MAX_STEP_NODES,
        "wait_budget_us": limits.MAX_WAIT_BUDGET_US,
    }.items()
}
RANGES["StepPolicy.max_prefill_tokens_per_step"] = {limits.MAX_PREFILL_TOKENS, limits.DEFAULT_PREFILL_TOKENS}

ELSEWHERE = {
    "DeviceInfo.utilization",  # a fraction
    "DraftBatch.support_weights",  # paceline.sampling.distribution.MAX_WEIGHT
    "SamplingParams.min_p",  # a probability
    "SamplingParams.top_p",  # a probability
    "Tensor.shape",  # services.runtime.tensors
}
"""Fields with a range that is no limit of the contract."""

_FIELD = re.compile(r"^\s*(?:repeated |optional )?(?:map<[^>]*>|[\w.]+) (\w+) = \d+;")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
_RANGE = re.compile(r"-?\d+ to -?\d+|at most \d+|first \d{2,}")


def fields_with_comments() -> Iterator[tuple[str, str]]:
    for path in PROTOS:
        message, comment = "", ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if started := re.match(r"^message (\w+)", line):
                message = started[1]
            if line.lstrip().startswith("//"):
                comment += " " + line.lstrip("/ ")
                continue
            if (field := _FIELD.match(line)) and message:
                yield f"{message}.{field[1]}", comment
            comment = ""


COMMENTS = dict(fields_with_comments())


@pytest.mark.parametrize("field", sorted(RANGES))
def test_a_comment_names_the_limits_of_its_field(field: str) -> None:
    numbers = {float(number) for number in _NUMBER.findall(COMMENTS[field])}
    assert {float(limit) for limit in RANGES[field]} <= numbers, COMMENTS[field]


def test_every_range_in_a_comment_is_compared() -> None:
    with_range = {field for field, comment in COMMENTS.items() if _RANGE.search(comment)}
    assert with_range - set(RANGES) == ELSEWHERE


def bounds(settings: type[BaseModel], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    field = settings.model_fields[name]
    nested = [
        item
        for part in getattr(field.annotation, "__args__", ())
        for item in getattr(part, "__metadata__", ())
    ]
    for item in (*field.metadata, *nested):
        for constraint in getattr(item, "metadata", [item]):
            if isinstance(constraint, annotated_types.Le):
                found["le"] = constraint.le
            if isinstance(constraint, annotated_types.Ge):
                found["ge"] = constraint.ge
    return found


@pytest.mark.parametrize(
    ("settings", "name", "most"),
    [
        (OrchestratorSettings, "draft_length", limits.MAX_DRAFT_LENGTH),
        (OrchestratorSettings, "draft_ahead", limits.MAX_DRAFT_LENGTH),
        (OrchestratorSettings, "num_outcomes", limits.MAX_OUTCOMES),
        (OrchestratorSettings, "max_nodes", limits.MAX_DRAFT_NODES),
        (OrchestratorSettings, "wait_budget_us", limits.MAX_WAIT_BUDGET_US),
        (OrchestratorSettings, "max_prefill_tokens_per_step", limits.MAX_PREFILL_TOKENS),
        (OrchestratorSettings, "drafters_per_sequence", limits.MAX_PARTITIONS),
        (OrchestratorSettings, "lease_s", limits.MAX_LEASE_MS / 1000),
        (SchedulerSettings, "max_draft_length", limits.MAX_DRAFT_LENGTH),
        (SchedulerSettings, "cold_draft_length", limits.MAX_DRAFT_LENGTH),
        (SchedulerSettings, "max_nodes_per_sequence", limits.MAX_DRAFT_NODES),
        (SchedulerSettings, "max_nodes_per_step", limits.MAX_STEP_NODES),
        (SchedulerSettings, "max_outcomes", limits.MAX_OUTCOMES),
        (SchedulerSettings, "max_wait_ms", limits.MAX_WAIT_BUDGET_US / 1000),
        *(
            (settings, "max_sequences", limits.MAX_SEQUENCES)
            for settings in (OrchestratorSettings, VerifierSettings, DrafterSettings)
        ),
        *((settings, "threads", limits.MAX_THREADS) for settings in (VerifierSettings, DrafterSettings)),
    ],
)
def test_a_setting_allows_what_the_frames_allow(settings: type[BaseModel], name: str, most: float) -> None:
    assert bounds(settings, name)["le"] == most


def test_processes_hold_equally_many_sequences_by_default() -> None:
    for settings in (OrchestratorSettings, VerifierSettings, DrafterSettings):
        assert settings.model_fields["max_sequences"].default == limits.DEFAULT_MAX_SEQUENCES


def test_every_default_of_a_policy_is_within_its_limits() -> None:
    published = SpeculationPolicy.default()
    assert SpeculationPolicy.from_dict(published.to_dict()) == published
    assert SpeculationPolicy.from_proto(published.to_proto()) == published
    step = step_policy(published, PolicyOverrides())
    for policy in (StepPolicy(), step):
        assert StepPolicy.from_proto(policy.to_proto()) == policy
    # A process that has no policy yet behaves like one under the default policy that nobody drafts for.
    alone = step.for_verifier(is_colocated=True, is_drafter_due=False)
    assert StepPolicy(draft_ahead=alone.draft_ahead) == alone
