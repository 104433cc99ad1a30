"""Log-probabilities of what a step committed, and of what it ran of prompts, for the sequences that ask.

Responsible for: which rows they are read from, and the messages that report them. Deliberately does not know: how the
rows were chosen or verified; the logits it gets are the target's, before any rule.

Called by: the step loop, once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.sampling import TokenLogProbs, Verdict, token_log_probs
from paceline.v1 import sampling_pb2, target_pb2
from services.verifier.sequence import TargetSequence

MAX_PROMPT_ROWS = 256
"""Rows of prompts in one step whose logits are wanted: 50 MB of them for a vocabulary of 49,152."""


@dataclass(frozen=True, slots=True)
class LogProbSpan:
    """Tokens of one sequence whose log-probabilities are wanted.

    Attributes:
        logits: `[n, vocab]` float32, the target's own: row i chose `tokens[i]`.
        num_top: alternatives for each.
        prompt_start: position of the first token where they are the prompt's; None where they were committed.
    """

    sequence: TargetSequence
    logits: Tensor
    tokens: Sequence[int]
    num_top: int
    prompt_start: int | None = None


def num_prompt_rows(sequence: TargetSequence, num_settled: int) -> int:
    """How many of a step's leading rows, of committed tokens not yet run, come before prompt tokens asked for."""
    if sequence.spec.num_prompt_top is None:
        return 0
    return max(0, min(num_settled, sequence.spec.num_prompt_tokens - 1 - sequence.num_cached))


def prompt_span(sequence: TargetSequence, start: int, logits: Tensor) -> LogProbSpan:
    """The prompt tokens after the rows at positions from `start` on, `logits` being those of these rows."""
    assert sequence.spec.num_prompt_top is not None, "asked for"
    tokens = sequence.spec.prompt[start + 1 : start + 1 + logits.shape[0]]
    return LogProbSpan(sequence, logits, tokens, sequence.spec.num_prompt_top, start + 1)


def raw_rows(sequence: TargetSequence, logits: Tensor, first: int, end: int) -> Tensor | None:
    """The rows of a decision as the target gave them, to be kept before rules change them; None if nobody asks."""
    if sequence.spec.num_top is None:
        return None
    logits = logits[first:end]
    return logits.clone() if sequence.rules else logits


def committed_span(
    sequence: TargetSequence, raw: Tensor, verdict: Verdict, tokens: Sequence[int]
) -> LogProbSpan:
    """The tokens that a verdict committed, as far as they were kept; `raw` is `[1 + nodes, vocab]`."""
    assert sequence.spec.num_top is not None, "asked for"
    rows = verdict.kept_rows[: len(tokens)]
    return LogProbSpan(sequence, raw[list(rows)], tokens, sequence.spec.num_top)


def report_spans(spans: Sequence[LogProbSpan]) -> list[tuple[TargetSequence, target_pb2.SequenceLogProbs]]:
    """One message for each sequence that has a share, all computed together."""
    if not spans:
        return []
    logits = spans[0].logits if len(spans) == 1 else torch.cat([span.logits for span in spans])
    tokens = [token for span in spans for token in span.tokens]
    found = token_log_probs(logits, tokens, max(span.num_top for span in spans))
    messages: dict[int, tuple[TargetSequence, target_pb2.SequenceLogProbs]] = {}
    start = 0
    for span in spans:
        sequence_id, stop = span.sequence.sequence_id, start + len(span.tokens)
        if sequence_id not in messages:
            messages[sequence_id] = span.sequence, target_pb2.SequenceLogProbs(sequence_id=sequence_id)
        message = messages[sequence_id][1]
        packed = _pack(found.part(start, stop, span.num_top), span.num_top)
        if span.prompt_start is None:
            message.committed.CopyFrom(packed)
        else:
            message.prompt.CopyFrom(packed)
            message.prompt_start = span.prompt_start
        start = stop
    return list(messages.values())


def _pack(found: TokenLogProbs, num_top: int) -> sampling_pb2.LogProbs:
    return sampling_pb2.LogProbs(
        log_probs=found.log_probs.tolist(),
        ranks=found.ranks.tolist(),
        num_top=num_top,
        top_token_ids=found.top_token_ids.flatten().tolist(),
        top_log_probs=found.top_log_probs.flatten().tolist(),
    )
