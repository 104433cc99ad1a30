from paceline.v1 import generation_pb2 as _generation_pb2
from paceline.v1 import peer_pb2 as _peer_pb2
from paceline.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdmitRequest(_message.Message):
    __slots__ = ("num_prompt_tokens", "max_new_tokens")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    max_new_tokens: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("request_id", "conductor_endpoint")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONDUCTOR_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    conductor_endpoint: str
    def __init__(self, request_id: _Optional[str] = ..., conductor_endpoint: _Optional[str] = ...) -> None: ...

class DescribeDeploymentRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeDeploymentResponse(_message.Message):
    __slots__ = ("verifier", "drafters", "placement", "has_policy")
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    HAS_POLICY_FIELD_NUMBER: _ClassVar[int]
    verifier: _peer_pb2.PeerInfo
    drafters: _containers.RepeatedCompositeFieldContainer[_peer_pb2.PeerInfo]
    placement: str
    has_policy: bool
    def __init__(self, verifier: _Optional[_Union[_peer_pb2.PeerInfo, _Mapping]] = ..., drafters: _Optional[_Iterable[_Union[_peer_pb2.PeerInfo, _Mapping]]] = ..., placement: _Optional[str] = ..., has_policy: _Optional[bool] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "max_new_tokens", "stop_token_ids", "speculation", "num_resumed_tokens", "log_probs", "stream_interval", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    speculation: _sampling_pb2.SpeculationOptions
    num_resumed_tokens: int
    log_probs: _sampling_pb2.LogProbOptions
    stream_interval: int
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., speculation: _Optional[_Union[_sampling_pb2.SpeculationOptions, _Mapping]] = ..., num_resumed_tokens: _Optional[int] = ..., log_probs: _Optional[_Union[_sampling_pb2.LogProbOptions, _Mapping]] = ..., stream_interval: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("token_ids", "finish_reason", "stats", "log_probs", "prompt_log_probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _sampling_pb2.FinishReason
    stats: _generation_pb2.GenerationStats
    log_probs: _sampling_pb2.LogProbs
    prompt_log_probs: _sampling_pb2.LogProbs
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., stats: _Optional[_Union[_generation_pb2.GenerationStats, _Mapping]] = ..., log_probs: _Optional[_Union[_sampling_pb2.LogProbs, _Mapping]] = ..., prompt_log_probs: _Optional[_Union[_sampling_pb2.LogProbs, _Mapping]] = ...) -> None: ...
