from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftDraw(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_DRAW_UNSPECIFIED: _ClassVar[DraftDraw]
    DRAFT_DRAW_WITH_REPLACEMENT: _ClassVar[DraftDraw]
    DRAFT_DRAW_WITHOUT_REPLACEMENT: _ClassVar[DraftDraw]
DRAFT_DRAW_UNSPECIFIED: DraftDraw
DRAFT_DRAW_WITH_REPLACEMENT: DraftDraw
DRAFT_DRAW_WITHOUT_REPLACEMENT: DraftDraw

class PeerInfo(_message.Message):
    __slots__ = ("protocol_version", "instance_id", "model_fingerprint", "tokenizer_fingerprint", "vocab_size", "max_positions", "dtype", "method", "tap", "device", "model_name", "eos_token_ids", "drafter_name", "longest_draft")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    TAP_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_NAME_FIELD_NUMBER: _ClassVar[int]
    LONGEST_DRAFT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    instance_id: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_positions: int
    dtype: str
    method: str
    tap: FeatureTap
    device: DeviceInfo
    model_name: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    drafter_name: str
    longest_draft: int
    def __init__(self, protocol_version: _Optional[int] = ..., instance_id: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_positions: _Optional[int] = ..., dtype: _Optional[str] = ..., method: _Optional[str] = ..., tap: _Optional[_Union[FeatureTap, _Mapping]] = ..., device: _Optional[_Union[DeviceInfo, _Mapping]] = ..., model_name: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., drafter_name: _Optional[str] = ..., longest_draft: _Optional[int] = ...) -> None: ...

class FeatureTap(_message.Message):
    __slots__ = ("layers", "width", "projection_fingerprint", "final_norm", "last_only", "is_optional", "cached_layers")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FINAL_NORM_FIELD_NUMBER: _ClassVar[int]
    LAST_ONLY_FIELD_NUMBER: _ClassVar[int]
    IS_OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    CACHED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    width: int
    projection_fingerprint: str
    final_norm: bool
    last_only: bool
    is_optional: bool
    cached_layers: _containers.RepeatedCompositeFieldContainer[CachedLayer]
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., width: _Optional[int] = ..., projection_fingerprint: _Optional[str] = ..., final_norm: _Optional[bool] = ..., last_only: _Optional[bool] = ..., is_optional: _Optional[bool] = ..., cached_layers: _Optional[_Iterable[_Union[CachedLayer, _Mapping]]] = ...) -> None: ...

class CachedLayer(_message.Message):
    __slots__ = ("layer", "num_kv_heads", "head_dim", "window")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    layer: int
    num_kv_heads: int
    head_dim: int
    window: int
    def __init__(self, layer: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class DeviceInfo(_message.Message):
    __slots__ = ("device", "name", "memory_total_bytes", "memory_used_bytes", "utilization", "note")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    device: str
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    utilization: float
    note: str
    def __init__(self, device: _Optional[str] = ..., name: _Optional[str] = ..., memory_total_bytes: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., utilization: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class StreamHello(_message.Message):
    __slots__ = ("protocol_version", "client_id", "lease_ms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client_id: str
    lease_ms: int
    def __init__(self, protocol_version: _Optional[int] = ..., client_id: _Optional[str] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class StepPolicy(_message.Message):
    __slots__ = ("version", "draft_length", "draft_ahead", "num_outcomes", "max_nodes_per_sequence", "max_nodes_per_step", "wait_budget_us", "max_prefill_tokens_per_step")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_BUDGET_US_FIELD_NUMBER: _ClassVar[int]
    MAX_PREFILL_TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    version: int
    draft_length: int
    draft_ahead: int
    num_outcomes: int
    max_nodes_per_sequence: int
    max_nodes_per_step: int
    wait_budget_us: int
    max_prefill_tokens_per_step: int
    def __init__(self, version: _Optional[int] = ..., draft_length: _Optional[int] = ..., draft_ahead: _Optional[int] = ..., num_outcomes: _Optional[int] = ..., max_nodes_per_sequence: _Optional[int] = ..., max_nodes_per_step: _Optional[int] = ..., wait_budget_us: _Optional[int] = ..., max_prefill_tokens_per_step: _Optional[int] = ...) -> None: ...

class DraftBatch(_message.Message):
    __slots__ = ("sequence_ids", "epochs", "starts", "sizes", "tokens", "parents", "log_probs", "draws", "num_supports", "support_sizes", "support_tokens", "support_weights", "support_confidences")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SUPPORTS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_SIZES_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    draws: _containers.RepeatedScalarFieldContainer[DraftDraw]
    num_supports: _containers.RepeatedScalarFieldContainer[int]
    support_sizes: _containers.RepeatedScalarFieldContainer[int]
    support_tokens: _containers.RepeatedScalarFieldContainer[int]
    support_weights: bytes
    support_confidences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., draws: _Optional[_Iterable[_Union[DraftDraw, str]]] = ..., num_supports: _Optional[_Iterable[int]] = ..., support_sizes: _Optional[_Iterable[int]] = ..., support_tokens: _Optional[_Iterable[int]] = ..., support_weights: _Optional[bytes] = ..., support_confidences: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitBatch(_message.Message):
    __slots__ = ("sequence_ids", "epochs", "starts", "sizes", "tokens")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceFailure(_message.Message):
    __slots__ = ("sequence_id", "key", "code", "reason", "message")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    key: int
    code: int
    reason: str
    message: str
    def __init__(self, sequence_id: _Optional[int] = ..., key: _Optional[int] = ..., code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
