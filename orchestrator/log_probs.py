"""Log-probabilities that a verifier reports, checked and cut to those that a sequence does not have yet.

Responsible for: keeping them aligned with the tokens, so that none is missing or repeated after a verifier was lost.
Deliberately does not know: streams, readers.

Called by: orchestrator.step_handler.
"""

from __future__ import annotations

from orchestrator.sequences import Sequence
from paceline.contract.errors import StreamProtocolError
from paceline.v1 import sampling_pb2, target_pb2
from services.runtime.log_probs import check_log_probs, cut_log_probs


def check_committed(
    sequence: Sequence, message: target_pb2.SequenceLogProbs | None, num_tokens: int, vocab_size: int
) -> None:
    """Checks the log-probabilities of a commit, before anything of it is taken in.

    Args:
        sequence: the sequence of the commit.
        message: what came with the commit; None where nothing did.
        num_tokens: tokens in the commit.
        vocab_size: the target's.

    Raises:
        StreamProtocolError: they do not fit the commit, or the request asked for others.
    """
    if sequence.log_probs.HasField("num_top"):
        committed = (message or target_pb2.SequenceLogProbs()).committed
        _check(committed, num_tokens, sequence.log_probs.num_top, vocab_size)


def new_log_probs(
    sequence: Sequence, message: target_pb2.SequenceLogProbs | None, num_tokens: int, num_new: int
) -> sampling_pb2.LogProbs | None:
    """Those of the last `num_new` tokens of a checked commit of `num_tokens`; None where the request did not ask."""
    if message is None or not sequence.log_probs.HasField("num_top"):
        return None
    return cut_log_probs(message.committed, num_tokens - num_new, num_tokens)


def take_prompt_log_probs(sequence: Sequence, message: target_pb2.SequenceLogProbs, vocab_size: int) -> None:
    """Puts the new log-probabilities of the prompt into the output queue; a later opening may repeat known ones.

    Raises:
        StreamProtocolError: the report leaves a gap, passes the prompt's end or does not fit the request.
    """
    if not message.HasField("prompt") or not sequence.log_probs.HasField("num_prompt_top"):
        return
    size, known = len(message.prompt.log_probs), sequence.num_prompt_log_probs
    num_known = known + 1 - message.prompt_start  # position 0 has none
    if num_known < 0 or message.prompt_start + size > sequence.commit_log.num_prompt_tokens:
        raise StreamProtocolError(
            f"log-probabilities of prompt positions from {message.prompt_start} to {message.prompt_start + size}: "
            f"{known + 1} comes next of {sequence.commit_log.num_prompt_tokens}"
        )
    _check(message.prompt, size, sequence.log_probs.num_prompt_top, vocab_size)
    if num_known < size:
        sequence.output_queue.put_prompt(cut_log_probs(message.prompt, num_known, size))
        sequence.num_prompt_log_probs += size - num_known


def _check(message: sampling_pb2.LogProbs, num_tokens: int, num_top: int, vocab_size: int) -> None:
    try:
        check_log_probs(message, num_tokens, num_top, vocab_size)
    except ValueError as error:
        raise StreamProtocolError(f"log-probabilities of a step report: {error}") from error
