"""What the target alone writes, with the features that a drafter reads of it.

Deliberately does not know: drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.draft_tree import EMPTY_TREE
from paceline.sampling.batch import verify_step
from paceline.sampling.params import SamplingParams
from paceline.target import SequenceRows, TargetEngine


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its plain continuation.

    Attributes:
        tokens: of both.
        num_prompt: of the prompt.
        features: `[len(tokens) - 1, width]` of all positions but the last; `[.., 0]` without a tap.
        sampling: how tokens were chosen.
    """

    tokens: list[int]
    num_prompt: int
    features: Tensor
    sampling: SamplingParams


def write(
    engine: TargetEngine,
    prompt: Sequence[int],
    sampling: SamplingParams,
    max_tokens: int,
    eos: frozenset[int],
) -> Text:
    """Decode plainly, one token a pass."""
    tokens, parts = list(prompt), []
    slot = engine.open(len(prompt) + max_tokens)
    rows = SequenceRows(slot, tokens, num_logits="last", wants_features=True)
    for _ in range(max_tokens):
        output = engine.step([rows])
        (verdict,) = verify_step(output.logits[0], [EMPTY_TREE], [len(tokens)], [sampling])
        parts.append(output.features[0] if output.features else torch.zeros(len(rows.tokens), 0))
        tokens.extend(verdict.committed_tokens)
        if tokens[-1] in eos:
            break
        rows = SequenceRows(slot, tokens[-1:], wants_features=True)
    engine.close(slot)
    return Text(tokens, len(prompt), torch.cat(parts), sampling)
