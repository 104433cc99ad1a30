"""One generation as its client sees it: a started event, chunks, and exactly one finished event.

Responsible for: turning committed tokens into final text, stop texts, and the stats at the end. The client's
text depends on the tokens alone, not on the frames in which they arrive. Deliberately does not know: gRPC,
where tokens come from, deadlines.

Called by: :mod:`services.gateway.servicer`, which passes it the conductor's frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.contract.errors import UnavailableError
from paceline.v1 import generation_pb2, orchestrator_pb2, sampling_pb2
from services.gateway.checked_request import CheckedRequest
from services.gateway.detokenizer import Detokenizer
from services.gateway.served_model import ServedModel
from services.gateway.stop import StopTextMatcher
from services.runtime.log_probs import check_log_probs, cut_log_probs, join_log_probs
from services.runtime.sampling import sampling_params


class Generation:
    """State of one generation.

    Args:
        request: the checked request.
        model: the served model.
        detokenizer: a fresh one.
        clock: seconds, monotonic.
        index: choice that its events belong to.

    Attributes:
        token_ids: tokens generated so far.
        finish_reason: why the generation ended; unspecified while it continues.
        first_token_at: clock at the first token; None before it.
    """

    def __init__(
        self,
        request: CheckedRequest,
        model: ServedModel,
        detokenizer: Detokenizer,
        clock: Callable[[], float],
        index: int = 0,
    ) -> None:
        self._request = request
        self._model = model
        self._detokenizer = detokenizer
        self._stop_texts = StopTextMatcher(request.stop_texts)
        self._clock = clock
        self._index = index
        self._prompt_log_probs = sampling_pb2.LogProbs()
        self._wants_prompt = request.log_probs.HasField("num_prompt_top")  # False once they are sent
        self._started_at = clock()
        self._num_frames = 0
        self._num_lost_frames = 0
        self._stats: generation_pb2.GenerationStats | None = None
        self.token_ids: list[int] = []
        self.finish_reason: sampling_pb2.FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED
        self.first_token_at: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the finished event has been made."""
        return self.finish_reason != sampling_pb2.FINISH_REASON_UNSPECIFIED

    def started(self, request_id: str) -> generation_pb2.GenerateResponse:
        """The first event."""
        return generation_pb2.GenerateResponse(
            index=self._index,
            started=generation_pb2.GenerationStarted(
                request_id=request_id,
                model=self._model.name,
                num_prompt_tokens=len(self._request.prompt_token_ids),
                seed=self._request.sampling.seed,
                mode=self._request.sampling.mode,
                is_exact=sampling_params(self._request.sampling).resolved_mode.is_exact,
            ),
        )

    def push(self, frame: orchestrator_pb2.RunResponse) -> list[generation_pb2.GenerateResponse]:
        """Adds a frame of the conductor and returns the events that follow from it.

        Raises:
            UnavailableError: the conductor sent a token that the model does not have, or log-probabilities that
                do not match the tokens.
        """
        assert not self.is_finished, "a frame after the end"
        events = self._take_prompt_log_probs(frame)
        options = self._request.log_probs
        if options.HasField("num_top"):
            self._check_log_probs(frame.log_probs, len(frame.token_ids), options.num_top)
        if frame.HasField("stats"):
            self._stats = frame.stats
        if frame.token_ids:
            self._num_frames += 1
            if self.first_token_at is None:
                self.first_token_at = self._clock()
        text, num_taken = self._take(frame.token_ids)
        reason = frame.finish_reason
        if reason != sampling_pb2.FINISH_REASON_UNSPECIFIED and self._stop_texts.matched is None:
            text += self._end_of_text()
        if self._stop_texts.matched is not None:
            reason = sampling_pb2.FINISH_REASON_STOP
        if text or num_taken:
            chunk = generation_pb2.GenerationChunk(text=text, token_ids=frame.token_ids[:num_taken])
            if num_taken and options.HasField("num_top"):
                chunk.log_probs.CopyFrom(cut_log_probs(frame.log_probs, 0, num_taken))
            events.append(generation_pb2.GenerateResponse(chunk=chunk, index=self._index))
        if reason != sampling_pb2.FINISH_REASON_UNSPECIFIED:
            self.finish_reason = reason
            finished = generation_pb2.GenerationFinished(reason=reason, stats=self._final_stats())
            events.append(generation_pb2.GenerateResponse(finished=finished, index=self._index))
        return events

    def run_lost(self) -> None:
        """The run failed. The next run continues from the tokens so far, and its stats start again."""
        self._stats = None
        self._num_lost_frames = self._num_frames

    def _take(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Adds tokens up to the one that completes a stop text; returns the new text and how many were taken."""
        text = ""
        for index, token_id in enumerate(token_ids):
            if token_id >= self._model.vocab_size:
                raise UnavailableError(f"the conductor sent token {token_id}, which the model does not have")
            self.token_ids.append(token_id)
            if token_id in self._request.stop_token_ids:  # it counts as a token, but its text is not sent
                return text, index + 1
            may_stop = len(self.token_ids) > self._request.sampling.min_tokens
            text += self._stop_texts.push(self._detokenizer.push(token_id), may_match=may_stop)
            if self._stop_texts.matched is not None:
                return text, index + 1
        return text, len(token_ids)

    def _take_prompt_log_probs(
        self, frame: orchestrator_pb2.RunResponse
    ) -> list[generation_pb2.GenerateResponse]:
        """Collects the prompt's log-probabilities, which may arrive in parts, and returns them as one event when
        complete.
        """
        if not self._wants_prompt:
            return []
        join_log_probs(self._prompt_log_probs, frame.prompt_log_probs)
        token_ids = self._request.prompt_token_ids
        if len(self._prompt_log_probs.log_probs) < len(token_ids) - 1 and not frame.token_ids:
            return []
        num_top = self._request.log_probs.num_prompt_top
        self._check_log_probs(self._prompt_log_probs, len(token_ids) - 1, num_top)
        self._wants_prompt = False
        prompt = generation_pb2.PromptLogProbs(token_ids=token_ids, log_probs=self._prompt_log_probs)
        return [generation_pb2.GenerateResponse(prompt_log_probs=prompt, index=self._index)]

    def _check_log_probs(self, message: sampling_pb2.LogProbs, num_tokens: int, num_top: int) -> None:
        try:
            check_log_probs(message, num_tokens, num_top, self._model.vocab_size)
        except ValueError as error:
            raise UnavailableError(
                f"the conductor sent log-probabilities that do not fit: {error}"
            ) from error

    def _end_of_text(self) -> str:
        text = self._stop_texts.push(self._detokenizer.flush())
        return text + self._stop_texts.flush()

    def _final_stats(self) -> generation_pb2.GenerationStats:
        """The conductor's stats. If a stop text ended the run before they arrived, the stats known to the gateway."""
        stats = generation_pb2.GenerationStats()
        now = self._clock()
        first = now if self.first_token_at is None else self.first_token_at
        if self._stats is not None:
            stats.CopyFrom(self._stats)
            stats.num_target_passes += self._num_lost_frames
        else:
            stats.num_target_passes = self._num_frames
            stats.time_to_first_token_us = round((first - self._started_at) * 1e6)
            stats.decode_us = round((now - first) * 1e6)
        stats.num_prompt_tokens = len(self._request.prompt_token_ids)
        stats.num_generated_tokens = len(self.token_ids)
        return stats
