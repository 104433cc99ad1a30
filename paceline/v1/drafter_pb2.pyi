from paceline.v1 import peer_pb2 as _peer_pb2
from paceline.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrafterServiceDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterServiceDescribeResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _peer_pb2.PeerInfo
    def __init__(self, info: _Optional[_Union[_peer_pb2.PeerInfo, _Mapping]] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("hello", "frame_id", "opens", "closes", "commits", "policy")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FRAME_ID_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    hello: _peer_pb2.StreamHello
    frame_id: int
    opens: _containers.RepeatedCompositeFieldContainer[OpenDraftSequence]
    closes: _containers.RepeatedScalarFieldContainer[int]
    commits: _peer_pb2.CommitBatch
    policy: _peer_pb2.StepPolicy
    def __init__(self, hello: _Optional[_Union[_peer_pb2.StreamHello, _Mapping]] = ..., frame_id: _Optional[int] = ..., opens: _Optional[_Iterable[_Union[OpenDraftSequence, _Mapping]]] = ..., closes: _Optional[_Iterable[int]] = ..., commits: _Optional[_Union[_peer_pb2.CommitBatch, _Mapping]] = ..., policy: _Optional[_Union[_peer_pb2.StepPolicy, _Mapping]] = ...) -> None: ...

class OpenDraftSequence(_message.Message):
    __slots__ = ("sequence_id", "epoch", "token_ids", "sampling", "verifier_endpoint", "verifier_instance_id", "max_draft_tokens", "partition", "num_partitions", "reads_features")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    READS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    verifier_endpoint: str
    verifier_instance_id: str
    max_draft_tokens: int
    partition: int
    num_partitions: int
    reads_features: bool
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., verifier_endpoint: _Optional[str] = ..., verifier_instance_id: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ..., partition: _Optional[int] = ..., num_partitions: _Optional[int] = ..., reads_features: _Optional[bool] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("hello", "frame_id", "drafts", "queue_us", "draft_us", "num_draft_steps", "num_sequences", "failures", "wait_us")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FRAME_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    hello: _peer_pb2.PeerInfo
    frame_id: int
    drafts: _peer_pb2.DraftBatch
    queue_us: int
    draft_us: int
    num_draft_steps: int
    num_sequences: int
    failures: _containers.RepeatedCompositeFieldContainer[_peer_pb2.SequenceFailure]
    wait_us: int
    def __init__(self, hello: _Optional[_Union[_peer_pb2.PeerInfo, _Mapping]] = ..., frame_id: _Optional[int] = ..., drafts: _Optional[_Union[_peer_pb2.DraftBatch, _Mapping]] = ..., queue_us: _Optional[int] = ..., draft_us: _Optional[int] = ..., num_draft_steps: _Optional[int] = ..., num_sequences: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[_peer_pb2.SequenceFailure, _Mapping]]] = ..., wait_us: _Optional[int] = ...) -> None: ...
