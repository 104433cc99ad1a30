"""The rules of a sequence, made when it opens.

Responsible for: which rules a request asks for, and their order. Deliberately does not know: how a rule works
(`paceline.sampling`), logits, drafts.

Called by: services.verifier.table.
"""

from __future__ import annotations

from paceline.sampling.bad_runs import BadRuns
from paceline.sampling.bias import LogitBias
from paceline.sampling.min_tokens import MinTokens
from paceline.sampling.penalties import Penalties
from paceline.sampling.rules import LogitRule
from services.verifier.specs import SequenceSpec


def make_rules(spec: SequenceSpec, vocab_size: int) -> list[LogitRule]:
    """The rules in the order in which they are applied: bans, then biases, then penalties, as in vLLM.

    Args:
        spec: checked, every token id below `vocab_size`. Resumed tokens at the end of its prompt count as completion.
        vocab_size: number of logits.
    """
    sampling = spec.sampling
    if not sampling.has_rules:
        return []
    prompt, completion = spec.prompt[: spec.num_prompt_tokens], spec.prompt[spec.num_prompt_tokens :]
    rules: list[LogitRule] = []
    if sampling.bad_runs:
        rules.append(BadRuns(sampling.bad_runs, completion))
    if sampling.min_tokens and spec.stop_token_ids:
        rules.append(MinTokens(sampling.min_tokens, spec.stop_token_ids, len(completion)))
    if sampling.logit_bias:
        rules.append(LogitBias(sampling.logit_bias))
    if sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty:
        rules.append(
            Penalties(
                vocab_size,
                prompt,
                completion,
                repetition=sampling.repetition_penalty,
                presence=sampling.presence_penalty,
                frequency=sampling.frequency_penalty,
            )
        )
    return rules
