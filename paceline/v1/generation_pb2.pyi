from paceline.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NoDraftReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NO_DRAFT_REASON_UNSPECIFIED: _ClassVar[NoDraftReason]
    NO_DRAFT_REASON_REQUEST: _ClassVar[NoDraftReason]
    NO_DRAFT_REASON_POLICY: _ClassVar[NoDraftReason]
    NO_DRAFT_REASON_MISSING: _ClassVar[NoDraftReason]
    NO_DRAFT_REASON_LATE: _ClassVar[NoDraftReason]
NO_DRAFT_REASON_UNSPECIFIED: NoDraftReason
NO_DRAFT_REASON_REQUEST: NoDraftReason
NO_DRAFT_REASON_POLICY: NoDraftReason
NO_DRAFT_REASON_MISSING: NoDraftReason
NO_DRAFT_REASON_LATE: NoDraftReason

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "tokens", "sampling", "max_tokens", "stop", "ignore_eos", "speculation", "n", "bad_words", "log_probs", "stream_interval", "tenant")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatPrompt
    tokens: TokenPrompt
    sampling: _sampling_pb2.SamplingParams
    max_tokens: int
    stop: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.StopCondition]
    ignore_eos: bool
    speculation: _sampling_pb2.SpeculationOptions
    n: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    log_probs: _sampling_pb2.LogProbOptions
    stream_interval: int
    tenant: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[_Union[_sampling_pb2.StopCondition, _Mapping]]] = ..., ignore_eos: _Optional[bool] = ..., speculation: _Optional[_Union[_sampling_pb2.SpeculationOptions, _Mapping]] = ..., n: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., log_probs: _Optional[_Union[_sampling_pb2.LogProbOptions, _Mapping]] = ..., stream_interval: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "chunk", "finished", "prompt_log_probs", "index")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    started: GenerationStarted
    chunk: GenerationChunk
    finished: GenerationFinished
    prompt_log_probs: PromptLogProbs
    index: int
    def __init__(self, started: _Optional[_Union[GenerationStarted, _Mapping]] = ..., chunk: _Optional[_Union[GenerationChunk, _Mapping]] = ..., finished: _Optional[_Union[GenerationFinished, _Mapping]] = ..., prompt_log_probs: _Optional[_Union[PromptLogProbs, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class PromptLogProbs(_message.Message):
    __slots__ = ("token_ids", "log_probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _sampling_pb2.LogProbs
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Union[_sampling_pb2.LogProbs, _Mapping]] = ...) -> None: ...

class GenerationStarted(_message.Message):
    __slots__ = ("request_id", "model", "num_prompt_tokens", "seed", "mode", "is_exact")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    num_prompt_tokens: int
    seed: int
    mode: _sampling_pb2.VerifyMode
    is_exact: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., mode: _Optional[_Union[_sampling_pb2.VerifyMode, str]] = ..., is_exact: _Optional[bool] = ...) -> None: ...

class GenerationChunk(_message.Message):
    __slots__ = ("text", "token_ids", "log_probs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _sampling_pb2.LogProbs
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Union[_sampling_pb2.LogProbs, _Mapping]] = ...) -> None: ...

class GenerationFinished(_message.Message):
    __slots__ = ("reason", "stats")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    reason: _sampling_pb2.FinishReason
    stats: GenerationStats
    def __init__(self, reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., stats: _Optional[_Union[GenerationStats, _Mapping]] = ...) -> None: ...

class GenerationStats(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_generated_tokens", "num_target_passes", "num_draft_tokens", "num_accepted_tokens", "drafted_per_position", "accepted_per_position", "time_to_first_token_us", "decode_us", "no_draft_reason")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_PASSES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    NO_DRAFT_REASON_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_generated_tokens: int
    num_target_passes: int
    num_draft_tokens: int
    num_accepted_tokens: int
    drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    time_to_first_token_us: int
    decode_us: int
    no_draft_reason: NoDraftReason
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_target_passes: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., drafted_per_position: _Optional[_Iterable[int]] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., time_to_first_token_us: _Optional[int] = ..., decode_us: _Optional[int] = ..., no_draft_reason: _Optional[_Union[NoDraftReason, str]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "model_fingerprint", "vocab_size", "max_positions", "method", "placement")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_fingerprint: str
    vocab_size: int
    max_positions: int
    method: str
    placement: str
    def __init__(self, model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_positions: _Optional[int] = ..., method: _Optional[str] = ..., placement: _Optional[str] = ...) -> None: ...
