"""Log-probabilities of tokens under the target's own distribution.

Responsible for: float32 log-softmax, ranks and the likeliest alternatives, vectorised over rows. The input is
the model's logits, before any rule, temperature or filter.

Deliberately does not know: sequences, which rows were committed, the wire.

Called by: the verifier, for sequences that request log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS_AT_A_TIME = 64  # bounds the copy that the softmax makes: 13 MB for 49,152 tokens


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log-probabilities of n tokens, on the CPU.

    Attributes:
        log_probs: `[n]` float32, natural logarithms.
        ranks: `[n]` int64: 1 plus the number of likelier tokens.
        top_token_ids: `[n, num_top]` int64, likeliest first.
        top_log_probs: `[n, num_top]` float32.
    """

    log_probs: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_log_probs: Tensor

    def part(self, start: int, stop: int, num_top: int) -> TokenLogProbs:
        """Those of tokens `start` to `stop`, with `num_top` alternatives."""
        return TokenLogProbs(
            self.log_probs[start:stop],
            self.ranks[start:stop],
            self.top_token_ids[start:stop, :num_top],
            self.top_log_probs[start:stop, :num_top],
        )


def token_log_probs(logits: Tensor, tokens: Sequence[int], num_top: int) -> TokenLogProbs:
    """Log-probabilities of one token per row.

    Args:
        logits: `[n, vocab]` float32.
        tokens: n ids below vocab.
        num_top: alternatives, 0 to vocab.
    """
    if logits.shape[0] != len(tokens):
        raise ValueError(f"{logits.shape[0]} rows of logits but {len(tokens)} tokens")
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1)
    parts = [
        _rows_log_probs(rows, ids, num_top)
        for rows, ids in zip(logits.split(_ROWS_AT_A_TIME), chosen.split(_ROWS_AT_A_TIME), strict=True)
    ]
    return TokenLogProbs(*(torch.cat(columns).cpu() for columns in zip(*parts, strict=True)))


def _rows_log_probs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four columns for some rows; `chosen` is `[n, 1]`."""
    log_probs = logits.to(torch.float32).log_softmax(dim=-1)
    own = log_probs.gather(1, chosen)
    ranks = (log_probs > own).sum(dim=-1) + 1
    top = log_probs.topk(num_top, dim=-1)
    return own.squeeze(1), ranks, top.indices, top.values
