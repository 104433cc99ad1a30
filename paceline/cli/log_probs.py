"""Log-probabilities as lines for people.

Responsible for: one line per token. Deliberately does not know: where it is printed. Called by
:mod:`paceline.cli.printing`.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.client import Completion


def log_prob_lines(completion: Completion) -> Iterator[str]:
    """Token id, log-probability, rank and alternatives of each token."""
    for entry in completion.log_probs:
        alternatives = "".join(f"  {token_id}:{log_prob:.4f}" for token_id, log_prob in entry.top)
        yield f"token {entry.token_id:>6}  log-prob {entry.log_prob:9.4f}  rank {entry.rank:>5}{alternatives}"
