"""What a client returns: the events of a generation, and a completion made of them.

Responsible for: plain values in Python's types. Deliberately does not know: calls, retries. Made by the two
clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.client.log_probs import TokenLogProb, read_log_probs
from paceline.v1 import generation_pb2, sampling_pb2


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted.

    Attributes:
        request_id: the request's id in the servers' logs.
        model: name of the model.
        num_prompt_tokens: tokens of the prompt.
        seed: the seed in use, also if the server drew it; sending it again gives the same text.
        mode: "greedy", "coupled", "rejection", "block" or "typical".
        is_exact: whether the text has the target's own distribution; False for typical acceptance.
        index: choice that the event belongs to; 0 unless several were requested.
    """

    request_id: str
    model: str
    num_prompt_tokens: int
    seed: int
    mode: str
    is_exact: bool
    index: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogProbs:
    """Log-probabilities of the prompt; precedes the first chunk, with choice 0.

    Attributes:
        token_ids: tokens of the prompt.
        log_probs: of every token but the first, which has no text before it.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[TokenLogProb, ...]
    index: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """More text; it is final.

    Attributes:
        text: text since the last chunk; empty while a character is incomplete.
        token_ids: tokens since the last chunk.
        log_probs: of these tokens, if requested.
        index: choice that it belongs to.
    """

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[TokenLogProb, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Stats of one generation; generation.proto describes each (GenerationStats).

    Attributes:
        no_draft_reason: why no draft token was verified: "request" or "policy" (drafts were off), "missing" (no drafter
            had the text), "late" (drafts came too late, or none was chosen); empty if draft tokens were verified.
    """

    num_prompt_tokens: int
    num_generated_tokens: int
    num_target_passes: int
    num_draft_tokens: int
    num_accepted_tokens: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    time_to_first_token_s: float
    decode_s: float
    no_draft_reason: str = ""

    @property
    def tokens_per_pass(self) -> float:
        """Generated tokens per target pass; 1 is plain decoding."""
        return self.num_generated_tokens / max(1, self.num_target_passes)

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first per second after the first; 0 if there was only one."""
        return (self.num_generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Fraction of the draft tokens at each depth that were accepted."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=False)
        return tuple(accepted / max(1, drafted) for accepted, drafted in pairs)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a choice.

    Attributes:
        reason: "stop", "length", "cancelled" or "error".
        stats: of the generation.
        index: choice that ended.
    """

    reason: str
    stats: Stats
    index: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model and its limits."""

    model: str
    model_fingerprint: str
    vocab_size: int
    max_positions: int
    method: str
    placement: str

    @classmethod
    def from_proto(cls, message: generation_pb2.GetModelInfoResponse) -> ModelInfo:
        """Reads the wire's form."""
        return cls(
            message.model,
            message.model_fingerprint,
            message.vocab_size,
            message.max_positions,
            message.method,
            message.placement,
        )


Event = Started | PromptLogProbs | Chunk | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation.

    Attributes:
        log_probs: of its tokens, if requested.
        prompt_log_probs: of the prompt's tokens but the first, if requested; with choice 0.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Stats
    request_id: str
    model: str
    seed: int
    is_exact: bool = True
    log_probs: tuple[TokenLogProb, ...] = ()
    prompt_log_probs: tuple[TokenLogProb, ...] = ()

    @classmethod
    def many_from_events(cls, events: Iterable[Event]) -> list[Completion]:
        """Combines the events of several choices; the result is in order of their index."""
        by_choice: dict[int, list[Event]] = {}
        for event in events:
            by_choice.setdefault(event.index, []).append(event)
        return [cls.from_events(by_choice[index]) for index in sorted(by_choice)]

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Completion:
        """Combines the events of one generation.

        Args:
            events: from the started event to the finished one, of one choice.
        """
        started, finished, prompt, chunks = None, None, None, []
        for event in events:
            if isinstance(event, Started):
                started = event
            elif isinstance(event, Finished):
                finished = event
            elif isinstance(event, PromptLogProbs):
                prompt = event
            else:
                chunks.append(event)
        assert started is not None, "a generation has a beginning"
        assert finished is not None, "a generation has an end"
        return cls(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            finish_reason=finished.reason,
            stats=finished.stats,
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            is_exact=started.is_exact,
            log_probs=tuple(entry for chunk in chunks for entry in chunk.log_probs),
            prompt_log_probs=() if prompt is None else prompt.log_probs,
        )


def from_response(response: generation_pb2.GenerateResponse) -> Event | None:
    """The event in a response; None for an event that this version does not know."""
    kind = response.WhichOneof("event")
    if kind == "chunk":
        token_ids = tuple(response.chunk.token_ids)
        log_probs = read_log_probs(token_ids, response.chunk.log_probs)
        return Chunk(response.chunk.text, token_ids, log_probs, response.index)
    if kind == "started":
        started = response.started
        mode = sampling_pb2.VerifyMode.Name(started.mode).removeprefix("VERIFY_MODE_").lower()
        return Started(
            started.request_id,
            started.model,
            started.num_prompt_tokens,
            started.seed,
            mode,
            started.is_exact,
            response.index,
        )
    if kind == "finished":
        reason = (
            sampling_pb2.FinishReason.Name(response.finished.reason).removeprefix("FINISH_REASON_").lower()
        )
        return Finished(reason, _stats(response.finished.stats), response.index)
    if kind == "prompt_log_probs":
        token_ids = tuple(response.prompt_log_probs.token_ids)
        log_probs = read_log_probs(token_ids[1:], response.prompt_log_probs.log_probs)
        return PromptLogProbs(token_ids, log_probs, response.index)
    return None


_NO_DRAFT_REASONS: dict[int, str] = {
    generation_pb2.NO_DRAFT_REASON_REQUEST: "request",
    generation_pb2.NO_DRAFT_REASON_POLICY: "policy",
    generation_pb2.NO_DRAFT_REASON_MISSING: "missing",
    generation_pb2.NO_DRAFT_REASON_LATE: "late",
}


def _stats(message: generation_pb2.GenerationStats) -> Stats:
    return Stats(
        num_prompt_tokens=message.num_prompt_tokens,
        num_generated_tokens=message.num_generated_tokens,
        num_target_passes=message.num_target_passes,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        drafted_per_position=tuple(message.drafted_per_position),
        accepted_per_position=tuple(message.accepted_per_position),
        time_to_first_token_s=message.time_to_first_token_us / 1e6,
        decode_s=message.decode_us / 1e6,
        no_draft_reason=_NO_DRAFT_REASONS.get(message.no_draft_reason, ""),
    )
