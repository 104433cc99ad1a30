"""The commit log of one running request: its prompt and every token committed so far, in memory.

Responsible for: the text from which a request continues at another verifier, at a restarted one, or at another
drafter. Deliberately does not know streams, links or states. A conductor that restarts loses its commit logs. Then the
caller of Run holds the text: it calls again with the tokens it has (RunRequest.num_resumed_tokens).
Held by orchestrator.sequences, extended by orchestrator.step_handler.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq


class CommitGapError(ValueError):
    """A commit that starts past the end of the commit log: the tokens in between were lost."""


class CommitLog:
    """Text of one request.

    Args:
        tokens: the prompt, followed by tokens that an earlier run of the request generated.
        num_resumed_tokens: how many of them were generated.

    Attributes:
        tokens: the prompt followed by everything committed so far.
        num_prompt_tokens: leading tokens that do not count as generated.
    """

    __slots__ = ("num_prompt_tokens", "tokens")

    def __init__(self, tokens: Seq[int], num_resumed_tokens: int = 0) -> None:
        self.tokens = list(tokens)
        self.num_prompt_tokens = len(self.tokens) - num_resumed_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens after the prompt, in this run and in earlier ones."""
        return len(self.tokens) - self.num_prompt_tokens

    def append(self, start: int, tokens: Seq[int]) -> Seq[int]:
        """Appends a commit and returns the part of it that is new.

        A commit that repeats known tokens (a peer that reports twice) adds nothing twice.

        Args:
            start: length of the text before the commit.
            tokens: the committed tokens.

        Raises:
            CommitGapError: `start` lies past the end.
        """
        length = len(self.tokens)
        if start > length:
            raise CommitGapError(f"commit starts at {start}, the commit log ends at {length}")
        new_tokens = tokens[length - start :] if start < length else tokens
        self.tokens.extend(new_tokens)
        return new_tokens
