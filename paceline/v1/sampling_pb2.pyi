from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFY_MODE_UNSPECIFIED: _ClassVar[VerifyMode]
    VERIFY_MODE_GREEDY: _ClassVar[VerifyMode]
    VERIFY_MODE_COUPLED: _ClassVar[VerifyMode]
    VERIFY_MODE_REJECTION: _ClassVar[VerifyMode]

class StopType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_TYPE_UNSPECIFIED: _ClassVar[StopType]
    STOP_TYPE_TOKEN: _ClassVar[StopType]
    STOP_TYPE_TEXT: _ClassVar[StopType]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
VERIFY_MODE_UNSPECIFIED: VerifyMode
VERIFY_MODE_GREEDY: VerifyMode
VERIFY_MODE_COUPLED: VerifyMode
VERIFY_MODE_REJECTION: VerifyMode
STOP_TYPE_UNSPECIFIED: StopType
STOP_TYPE_TOKEN: StopType
STOP_TYPE_TEXT: StopType
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_ERROR: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "mode")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    mode: VerifyMode
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., mode: _Optional[_Union[VerifyMode, str]] = ...) -> None: ...

class StopCondition(_message.Message):
    __slots__ = ("type", "token_id", "text")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    type: StopType
    token_id: int
    text: str
    def __init__(self, type: _Optional[_Union[StopType, str]] = ..., token_id: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class SpeculationOptions(_message.Message):
    __slots__ = ("disabled", "max_draft_tokens")
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    disabled: bool
    max_draft_tokens: int
    def __init__(self, disabled: _Optional[bool] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...
