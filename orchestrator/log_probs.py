"""Log-probabilities that a verifier reports, checked and cut to what a sequence does not have yet.

Responsible for: keeping them aligned with the tokens, so that nothing is missing or repeated after a verifier was
lost. Deliberately does not know: streams, readers.

Called by: orchestrator.cycles.
"""

from __future__ import annotations

from orchestrator.sequences import ConductorSequences, Sequence
from paceline.contract.errors import StreamProtocolError
from paceline.v1 import sampling_pb2, target_pb2
from services.runtime.log_probs import check_log_probs, cut_log_probs


def check_step(
    step: target_pb2.StepReport, table: ConductorSequences, vocab_size: int
) -> dict[int, target_pb2.SequenceLogProbs]:
    """A step's messages by sequence id, before anything of the step is taken in.

    Raises:
        StreamProtocolError: what a commit comes with does not fit it or its request.
    """
    messages = {message.sequence_id: message for message in step.log_probs}
    commits = step.commits
    for sequence_id, epoch, size in zip(commits.sequence_ids, commits.epochs, commits.sizes, strict=True):
        sequence = table.by_id(sequence_id)
        if sequence is None or sequence.epoch != epoch or not sequence.log_probs.HasField("num_top"):
            continue
        message = messages.get(sequence_id, target_pb2.SequenceLogProbs())
        _check(message.committed, size, sequence.log_probs.num_top, vocab_size)
    return messages


def fresh_log_probs(
    sequence: Sequence, message: target_pb2.SequenceLogProbs | None, size: int, num_fresh: int
) -> sampling_pb2.LogProbs | None:
    """Those of the last `num_fresh` tokens of a checked commit of `size`; None where the request did not ask."""
    if message is None or not sequence.log_probs.HasField("num_top"):
        return None
    return cut_log_probs(message.committed, size - num_fresh, size)


def take_prompt_log_probs(sequence: Sequence, message: target_pb2.SequenceLogProbs, vocab_size: int) -> None:
    """Puts what is new of the prompt's into the output queue; a later opening may repeat known ones.

    Raises:
        StreamProtocolError: the report leaves a gap, passes the prompt's end or does not fit the request.
    """
    if not message.HasField("prompt") or not sequence.log_probs.HasField("num_prompt_top"):
        return
    size, known = len(message.prompt.log_probs), sequence.num_prompt_log_probs
    num_known = known + 1 - message.prompt_start  # position 0 has none
    if num_known < 0 or message.prompt_start + size > sequence.entry.num_prompt_tokens:
        raise StreamProtocolError(
            f"log-probabilities of prompt positions from {message.prompt_start} to {message.prompt_start + size}: "
            f"{known + 1} comes next of {sequence.entry.num_prompt_tokens}"
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
