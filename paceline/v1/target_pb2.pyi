from paceline.v1 import peer_pb2 as _peer_pb2
from paceline.v1 import sampling_pb2 as _sampling_pb2
from paceline.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TargetServiceDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetServiceDescribeResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _peer_pb2.PeerInfo
    def __init__(self, info: _Optional[_Union[_peer_pb2.PeerInfo, _Mapping]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("hello", "opens", "closes", "attaches", "drafts", "policy")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    ATTACHES_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    hello: _peer_pb2.StreamHello
    opens: _containers.RepeatedCompositeFieldContainer[OpenSequence]
    closes: _containers.RepeatedScalarFieldContainer[int]
    attaches: _containers.RepeatedCompositeFieldContainer[AttachFeatures]
    drafts: _peer_pb2.DraftBatch
    policy: _peer_pb2.StepPolicy
    def __init__(self, hello: _Optional[_Union[_peer_pb2.StreamHello, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[OpenSequence, _Mapping]]] = ..., closes: _Optional[_Iterable[int]] = ..., attaches: _Optional[_Iterable[_Union[AttachFeatures, _Mapping]]] = ..., drafts: _Optional[_Union[_peer_pb2.DraftBatch, _Mapping]] = ..., policy: _Optional[_Union[_peer_pb2.StepPolicy, _Mapping]] = ...) -> None: ...

class OpenSequence(_message.Message):
    __slots__ = ("key", "prompt_token_ids", "sampling", "max_new_tokens", "stop_token_ids", "max_draft_nodes", "epoch", "num_resumed_tokens", "log_probs", "reads_features")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_NODES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    READS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    key: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_draft_nodes: int
    epoch: int
    num_resumed_tokens: int
    log_probs: _sampling_pb2.LogProbOptions
    reads_features: bool
    def __init__(self, key: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_draft_nodes: _Optional[int] = ..., epoch: _Optional[int] = ..., num_resumed_tokens: _Optional[int] = ..., log_probs: _Optional[_Union[_sampling_pb2.LogProbOptions, _Mapping]] = ..., reads_features: _Optional[bool] = ...) -> None: ...

class AttachFeatures(_message.Message):
    __slots__ = ("sequence_id", "subscriber_id", "start")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    subscriber_id: str
    start: int
    def __init__(self, sequence_id: _Optional[int] = ..., subscriber_id: _Optional[str] = ..., start: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("hello", "opened", "step", "failures", "profile")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    hello: _peer_pb2.PeerInfo
    opened: _containers.RepeatedCompositeFieldContainer[SequenceOpened]
    step: StepReport
    failures: _containers.RepeatedCompositeFieldContainer[_peer_pb2.SequenceFailure]
    profile: StepProfile
    def __init__(self, hello: _Optional[_Union[_peer_pb2.PeerInfo, _Mapping]] = ..., opened: _Optional[_Iterable[_Union[SequenceOpened, _Mapping]]] = ..., step: _Optional[_Union[StepReport, _Mapping]] = ..., failures: _Optional[_Iterable[_Union[_peer_pb2.SequenceFailure, _Mapping]]] = ..., profile: _Optional[_Union[StepProfile, _Mapping]] = ...) -> None: ...

class StepProfile(_message.Message):
    __slots__ = ("num_rows", "num_sequences", "num_context_tokens", "step_us")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    num_rows: _containers.RepeatedScalarFieldContainer[int]
    num_sequences: _containers.RepeatedScalarFieldContainer[int]
    num_context_tokens: _containers.RepeatedScalarFieldContainer[int]
    step_us: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_rows: _Optional[_Iterable[int]] = ..., num_sequences: _Optional[_Iterable[int]] = ..., num_context_tokens: _Optional[_Iterable[int]] = ..., step_us: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceOpened(_message.Message):
    __slots__ = ("key", "sequence_id", "epoch")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    key: int
    sequence_id: int
    epoch: int
    def __init__(self, key: _Optional[int] = ..., sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step_index", "num_rows", "num_sequences", "num_context_tokens", "num_prefill_rows", "forward_us", "step_us", "draft_wait_us", "colocated_draft_us", "overhead_us", "policy_version", "commits", "num_draft_tokens", "draft_depths", "num_accepted_tokens", "drafter_depths", "num_accepted_of_drafter", "finish_reasons", "cache_hits", "num_acceptance_samples", "acceptance_samples", "dropped", "log_probs")
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_ROWS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_US_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_US_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DEPTHS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_DEPTHS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_OF_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTANCE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    step_index: int
    num_rows: int
    num_sequences: int
    num_context_tokens: int
    num_prefill_rows: int
    forward_us: int
    step_us: int
    draft_wait_us: int
    colocated_draft_us: int
    overhead_us: int
    policy_version: int
    commits: _peer_pb2.CommitBatch
    num_draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    draft_depths: _containers.RepeatedScalarFieldContainer[int]
    num_accepted_tokens: _containers.RepeatedScalarFieldContainer[int]
    drafter_depths: _containers.RepeatedScalarFieldContainer[int]
    num_accepted_of_drafter: _containers.RepeatedScalarFieldContainer[int]
    finish_reasons: _containers.RepeatedScalarFieldContainer[_sampling_pb2.FinishReason]
    cache_hits: _containers.RepeatedScalarFieldContainer[int]
    num_acceptance_samples: _containers.RepeatedScalarFieldContainer[int]
    acceptance_samples: _containers.RepeatedScalarFieldContainer[int]
    dropped: DroppedDrafts
    log_probs: _containers.RepeatedCompositeFieldContainer[SequenceLogProbs]
    def __init__(self, step_index: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_context_tokens: _Optional[int] = ..., num_prefill_rows: _Optional[int] = ..., forward_us: _Optional[int] = ..., step_us: _Optional[int] = ..., draft_wait_us: _Optional[int] = ..., colocated_draft_us: _Optional[int] = ..., overhead_us: _Optional[int] = ..., policy_version: _Optional[int] = ..., commits: _Optional[_Union[_peer_pb2.CommitBatch, _Mapping]] = ..., num_draft_tokens: _Optional[_Iterable[int]] = ..., draft_depths: _Optional[_Iterable[int]] = ..., num_accepted_tokens: _Optional[_Iterable[int]] = ..., drafter_depths: _Optional[_Iterable[int]] = ..., num_accepted_of_drafter: _Optional[_Iterable[int]] = ..., finish_reasons: _Optional[_Iterable[_Union[_sampling_pb2.FinishReason, str]]] = ..., cache_hits: _Optional[_Iterable[int]] = ..., num_acceptance_samples: _Optional[_Iterable[int]] = ..., acceptance_samples: _Optional[_Iterable[int]] = ..., dropped: _Optional[_Union[DroppedDrafts, _Mapping]] = ..., log_probs: _Optional[_Iterable[_Union[SequenceLogProbs, _Mapping]]] = ...) -> None: ...

class SequenceLogProbs(_message.Message):
    __slots__ = ("sequence_id", "committed", "prompt", "prompt_start")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_START_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    committed: _sampling_pb2.LogProbs
    prompt: _sampling_pb2.LogProbs
    prompt_start: int
    def __init__(self, sequence_id: _Optional[int] = ..., committed: _Optional[_Union[_sampling_pb2.LogProbs, _Mapping]] = ..., prompt: _Optional[_Union[_sampling_pb2.LogProbs, _Mapping]] = ..., prompt_start: _Optional[int] = ...) -> None: ...

class DroppedDrafts(_message.Message):
    __slots__ = ("stale", "old_epoch", "malformed", "ahead")
    STALE_FIELD_NUMBER: _ClassVar[int]
    OLD_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MALFORMED_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    stale: int
    old_epoch: int
    malformed: int
    ahead: int
    def __init__(self, stale: _Optional[int] = ..., old_epoch: _Optional[int] = ..., malformed: _Optional[int] = ..., ahead: _Optional[int] = ...) -> None: ...

class StreamFeaturesRequest(_message.Message):
    __slots__ = ("subscriber_id", "tap")
    SUBSCRIBER_ID_FIELD_NUMBER: _ClassVar[int]
    TAP_FIELD_NUMBER: _ClassVar[int]
    subscriber_id: str
    tap: _peer_pb2.FeatureTap
    def __init__(self, subscriber_id: _Optional[str] = ..., tap: _Optional[_Union[_peer_pb2.FeatureTap, _Mapping]] = ...) -> None: ...

class StreamFeaturesResponse(_message.Message):
    __slots__ = ("sequence_id", "epoch", "start", "features", "tokens", "recent")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    start: int
    features: _tensor_pb2.Tensor
    tokens: _containers.RepeatedScalarFieldContainer[int]
    recent: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., start: _Optional[int] = ..., features: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., recent: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ...) -> None: ...
