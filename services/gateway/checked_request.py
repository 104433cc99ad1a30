"""A request whose every field is in range, and the messages that are made of it.

Deliberately does not know: how fields are checked (:mod:`services.gateway.requests`), streams, text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.contract.limits import MAX_SEED
from paceline.v1 import orchestrator_pb2, sampling_pb2


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose every field is in range.

    Attributes:
        prompt_token_ids: at least one, and at most one less than the model's positions.
        sampling: all fields set, seed and mode included.
        max_new_tokens: at least 1; prompt and completion together fit the model's positions.
        stop_token_ids: the request's own and, unless ``ignore_eos``, the model's end tokens.
        stop_texts: in the order of the request.
        speculation: as sent.
        log_probs: as sent.
        stream_interval: tokens that are sent together.
        tenant: whose request it is, for statistics; may be empty.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: sampling_pb2.SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    stop_texts: tuple[str, ...]
    speculation: sampling_pb2.SpeculationOptions
    log_probs: sampling_pb2.LogProbOptions = field(default_factory=sampling_pb2.LogProbOptions)
    stream_interval: int = 1
    tenant: str = ""

    def choice(self, index: int) -> CheckedRequest:
        """The request of one of several completions: choice i has the seed plus i.

        Only choice 0 asks for the prompt's log-probabilities.
        """
        if index == 0:
            return self
        sampling = sampling_pb2.SamplingParams()
        sampling.CopyFrom(self.sampling)
        sampling.seed = (self.sampling.seed + index) & MAX_SEED
        return replace(self, sampling=sampling, log_probs=self._without_prompt_log_probs())

    def to_run_request(self, request_id: str, generated: Sequence[int] = ()) -> orchestrator_pb2.RunRequest:
        """The message that a conductor gets.

        Args:
            request_id: made by the director.
            generated: tokens that an earlier run has streamed. The prompt's log-probabilities came with the first of
                them and are not asked for again.
        """
        return orchestrator_pb2.RunRequest(
            request_id=request_id,
            prompt_token_ids=[*self.prompt_token_ids, *generated],
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=sorted(self.stop_token_ids),
            speculation=self.speculation,
            num_resumed_tokens=len(generated),
            log_probs=self._without_prompt_log_probs() if generated else self.log_probs,
            stream_interval=self.stream_interval,
            tenant=self.tenant,
        )

    def _without_prompt_log_probs(self) -> sampling_pb2.LogProbOptions:
        options = sampling_pb2.LogProbOptions()
        options.CopyFrom(self.log_probs)
        options.ClearField("num_prompt_top")
        return options
