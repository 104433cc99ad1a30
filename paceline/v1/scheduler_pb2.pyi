from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MeasurementKey(_message.Message):
    __slots__ = ("model_fingerprint", "dtype", "device_name", "method", "placement")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    dtype: str
    device_name: str
    method: str
    placement: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., device_name: _Optional[str] = ..., method: _Optional[str] = ..., placement: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("key", "steps", "drafts", "round_trips_us", "drafted_per_position", "accepted_per_position", "num_running_sequences", "peers", "round_trip_peers", "queues_us", "queue_peers", "acceptance", "tenants", "longest_draft")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIPS_US_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_PEERS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PEERS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_DRAFT_FIELD_NUMBER: _ClassVar[int]
    key: MeasurementKey
    steps: _containers.RepeatedCompositeFieldContainer[StepSample]
    drafts: _containers.RepeatedCompositeFieldContainer[DraftSample]
    round_trips_us: _containers.RepeatedScalarFieldContainer[int]
    drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    num_running_sequences: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerPair]
    round_trip_peers: _containers.RepeatedScalarFieldContainer[int]
    queues_us: _containers.RepeatedScalarFieldContainer[int]
    queue_peers: _containers.RepeatedScalarFieldContainer[int]
    acceptance: _containers.RepeatedCompositeFieldContainer[AcceptanceCounts]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUse]
    longest_draft: int
    def __init__(self, key: _Optional[_Union[MeasurementKey, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[StepSample, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[DraftSample, _Mapping]]] = ..., round_trips_us: _Optional[_Iterable[int]] = ..., drafted_per_position: _Optional[_Iterable[int]] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., num_running_sequences: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerPair, _Mapping]]] = ..., round_trip_peers: _Optional[_Iterable[int]] = ..., queues_us: _Optional[_Iterable[int]] = ..., queue_peers: _Optional[_Iterable[int]] = ..., acceptance: _Optional[_Iterable[_Union[AcceptanceCounts, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantUse, _Mapping]]] = ..., longest_draft: _Optional[int] = ...) -> None: ...

class TenantUse(_message.Message):
    __slots__ = ("tenant", "num_requests", "num_tokens", "num_draft_tokens", "num_accepted_tokens", "decode_us")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_requests: int
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    decode_us: int
    def __init__(self, tenant: _Optional[str] = ..., num_requests: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., decode_us: _Optional[int] = ...) -> None: ...

class PeerPair(_message.Message):
    __slots__ = ("conductor", "drafter")
    CONDUCTOR_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    conductor: str
    drafter: str
    def __init__(self, conductor: _Optional[str] = ..., drafter: _Optional[str] = ...) -> None: ...

class AcceptanceCounts(_message.Message):
    __slots__ = ("drafter", "cells", "trials", "accepted", "calibrated", "calibrated_trials", "calibrated_accepted")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    TRIALS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_TRIALS_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    cells: _containers.RepeatedScalarFieldContainer[int]
    trials: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    calibrated: _containers.RepeatedScalarFieldContainer[int]
    calibrated_trials: _containers.RepeatedScalarFieldContainer[int]
    calibrated_accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, drafter: _Optional[str] = ..., cells: _Optional[_Iterable[int]] = ..., trials: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., calibrated: _Optional[_Iterable[int]] = ..., calibrated_trials: _Optional[_Iterable[int]] = ..., calibrated_accepted: _Optional[_Iterable[int]] = ...) -> None: ...

class StepSample(_message.Message):
    __slots__ = ("num_rows", "num_sequences", "num_context_tokens", "step_us", "policy_version", "num_tokens", "num_cache_hits", "may_draft", "wait_us", "other_us")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    MAY_DRAFT_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    OTHER_US_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    num_sequences: int
    num_context_tokens: int
    step_us: int
    policy_version: int
    num_tokens: int
    num_cache_hits: int
    may_draft: bool
    wait_us: int
    other_us: int
    def __init__(self, num_rows: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_context_tokens: _Optional[int] = ..., step_us: _Optional[int] = ..., policy_version: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_cache_hits: _Optional[int] = ..., may_draft: _Optional[bool] = ..., wait_us: _Optional[int] = ..., other_us: _Optional[int] = ...) -> None: ...

class DraftSample(_message.Message):
    __slots__ = ("num_draft_steps", "num_sequences", "draft_us")
    NUM_DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    num_draft_steps: int
    num_sequences: int
    draft_us: int
    def __init__(self, num_draft_steps: _Optional[int] = ..., num_sequences: _Optional[int] = ..., draft_us: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("num_frames",)
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    num_frames: int
    def __init__(self, num_frames: _Optional[int] = ...) -> None: ...

class WatchPolicyRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: MeasurementKey
    def __init__(self, key: _Optional[_Union[MeasurementKey, _Mapping]] = ...) -> None: ...

class WatchPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: SpeculationPolicy
    def __init__(self, policy: _Optional[_Union[SpeculationPolicy, _Mapping]] = ...) -> None: ...

class SpeculationPolicy(_message.Message):
    __slots__ = ("version", "draft_length", "max_nodes_per_sequence", "max_nodes_per_step", "wait_budget_us", "draft_ahead", "num_outcomes", "expected_speedup", "reason")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_BUDGET_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    version: int
    draft_length: int
    max_nodes_per_sequence: int
    max_nodes_per_step: int
    wait_budget_us: int
    draft_ahead: int
    num_outcomes: int
    expected_speedup: float
    reason: str
    def __init__(self, version: _Optional[int] = ..., draft_length: _Optional[int] = ..., max_nodes_per_sequence: _Optional[int] = ..., max_nodes_per_step: _Optional[int] = ..., wait_budget_us: _Optional[int] = ..., draft_ahead: _Optional[int] = ..., num_outcomes: _Optional[int] = ..., expected_speedup: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: MeasurementKey
    def __init__(self, key: _Optional[_Union[MeasurementKey, _Mapping]] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("policy", "measurements_json", "is_redis_connected")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    IS_REDIS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    policy: SpeculationPolicy
    measurements_json: str
    is_redis_connected: bool
    def __init__(self, policy: _Optional[_Union[SpeculationPolicy, _Mapping]] = ..., measurements_json: _Optional[str] = ..., is_redis_connected: _Optional[bool] = ...) -> None: ...

class ListSubjectsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSubjectsResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[MeasurementKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[MeasurementKey, _Mapping]]] = ...) -> None: ...
