"""The commit log: the committed tokens of every running request, in memory.

Responsible for: knowing what a request's text is up to now, so that it can go on at another verifier, at a
restarted one, or at another drafter. Deliberately does not know streams, links or states. A conductor that is
itself restarted loses its commit log; then the caller of Run is the commit log: it calls again with the tokens it has
(RunRequest.num_resumed_tokens). Called by orchestrator.cycles.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field


class CommitGapError(ValueError):
    """A commit that starts past the end of the commit log: tokens in between were lost."""


@dataclass(slots=True)
class CommitLogEntry:
    """Text of one request.

    Attributes:
        request_id: the request.
        tokens: prompt followed by everything committed so far.
        num_prompt_tokens: leading tokens that are not counted as generated.
    """

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int

    @property
    def num_generated_tokens(self) -> int:
        """Tokens after the prompt, whoever generated them."""
        return len(self.tokens) - self.num_prompt_tokens

    def commit(self, start: int, tokens: Seq[int]) -> Seq[int]:
        """Appends a commit and returns the part of it that is new.

        A commit that repeats known tokens (a peer that reports twice) adds nothing twice.

        Raises:
            CommitGapError: if `start` lies past the end.
        """
        known = len(self.tokens)
        if start > known:
            raise CommitGapError(f"commit starts at {start}, the journal ends at {known}")
        fresh = tokens[known - start :] if start < known else tokens
        self.tokens.extend(fresh)
        return fresh


@dataclass(slots=True)
class CommitLog:
    """Entries of all running requests."""

    _entries: dict[str, CommitLogEntry] = field(default_factory=dict)

    def open(self, request_id: str, tokens: Seq[int], num_resumed_tokens: int = 0) -> CommitLogEntry:
        """Starts an entry; the last `num_resumed_tokens` of `tokens` count as generated."""
        if request_id in self._entries:
            raise ValueError(f"request {request_id} is running already")
        entry = CommitLogEntry(request_id, list(tokens), len(tokens) - num_resumed_tokens)
        self._entries[request_id] = entry
        return entry

    def close(self, request_id: str) -> None:
        """Forgets a request; unknown ones are ignored."""
        self._entries.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)
