"""Log-probabilities of the tokens that a step committed or ran of a prompt, for the sequences that ask for them.

Responsible for: which rows of logits they are read from, and the messages that report them. The logits are the target's
own, before any rule.

Deliberately does not know: how rows were scheduled or verified.

Called by: verification (keeps raw rows) and the step loop, once per step each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.sampling.log_probs import TokenLogProbs, token_log_probs
from paceline.v1 import sampling_pb2, target_pb2
from services.verifier.sequence import TargetSequence
from services.verifier.sequence_step import SequenceStep


@dataclass(frozen=True, slots=True)
class LogProbSpan:
    """Consecutive tokens of one sequence whose log-probabilities are wanted.

    Attributes:
        logits: `[n, vocab]` float32, the target's own: row i gave `tokens[i]`.
        num_top: alternatives for each token.
        prompt_start: position of the first token where the tokens are the prompt's; None where they were committed.
    """

    sequence: TargetSequence
    logits: Tensor
    tokens: Sequence[int]
    num_top: int
    prompt_start: int | None = None


def raw_rows(step: SequenceStep, logits: Tensor) -> Tensor:
    """The rows `[1 + nodes, vocab]` of a sequence's root and draft nodes, safe from its rules."""
    rows = logits[step.root_row : step.root_row + 1 + len(step.input.tree)]
    return rows.clone() if step.input.sequence.rules else rows


def log_prob_spans(steps: Sequence[SequenceStep], logits: Tensor) -> list[LogProbSpan]:
    """The wanted spans of a step with logits `[rows, vocab]`; a sequence that failed has none."""
    spans: list[LogProbSpan] = []
    for step in steps:
        if step.rule_error is not None:
            continue
        sequence, num_prompt_logits = step.input.sequence, step.input.num_prompt_logits
        if num_prompt_logits:
            assert sequence.spec.num_prompt_top is not None, "the request asks for them"
            begin = step.start + 1
            tokens: Sequence[int] = sequence.spec.prompt[begin : begin + num_prompt_logits]
            rows = logits[step.first_row : step.root_row]
            spans.append(LogProbSpan(sequence, rows, tokens, sequence.spec.num_prompt_top, begin))
        if step.raw_logits is not None and step.commit is not None:
            assert sequence.spec.num_top is not None, "the request asks for them"
            assert step.verdict is not None, "a commit follows a verdict"
            tokens = step.commit.tokens
            rows = step.raw_logits[list(step.verdict.kept_rows[: len(tokens)])]
            spans.append(LogProbSpan(sequence, rows, tokens, sequence.spec.num_top))
    return spans


def log_prob_messages(
    spans: Sequence[LogProbSpan],
) -> list[tuple[TargetSequence, target_pb2.SequenceLogProbs]]:
    """One message for each sequence that has a span; all spans are computed together."""
    if not spans:
        return []
    logits = spans[0].logits if len(spans) == 1 else torch.cat([span.logits for span in spans])
    tokens = [token for span in spans for token in span.tokens]
    log_probs = token_log_probs(logits, tokens, max(span.num_top for span in spans))
    messages: dict[int, tuple[TargetSequence, target_pb2.SequenceLogProbs]] = {}
    start = 0
    for span in spans:
        sequence_id, stop = span.sequence.sequence_id, start + len(span.tokens)
        if sequence_id not in messages:
            messages[sequence_id] = span.sequence, target_pb2.SequenceLogProbs(sequence_id=sequence_id)
        message = messages[sequence_id][1]
        packed = _pack(log_probs.part(start, stop, span.num_top), span.num_top)
        if span.prompt_start is None:
            message.committed.CopyFrom(packed)
        else:
            message.prompt.CopyFrom(packed)
            message.prompt_start = span.prompt_start
        start = stop
    return list(messages.values())


def _pack(log_probs: TokenLogProbs, num_top: int) -> sampling_pb2.LogProbs:
    return sampling_pb2.LogProbs(
        log_probs=log_probs.log_probs.tolist(),
        ranks=log_probs.ranks.tolist(),
        num_top=num_top,
        top_token_ids=log_probs.top_token_ids.flatten().tolist(),
        top_log_probs=log_probs.top_log_probs.flatten().tolist(),
    )
