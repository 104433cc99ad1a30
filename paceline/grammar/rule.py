"""The rule that keeps one sequence inside its grammar.

Responsible for: masking the rows of a step, each for the text that leads to it, and advancing over committed
tokens. A row's mask depends on that text alone: drafts decide which rows exist, never what is in them.
Deliberately does not know: how the grammar was written or compiled, other rules, verification.

Called by: the verifier, on its step loop's thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.draft_tree import DraftTree
from paceline.grammar.compiler import CompiledGrammar
from paceline.grammar.masks import forbid, num_words
from paceline.grammar.refusal import shortened
from paceline.sampling.rules import RuleError

# Budget of processor time for masks: each row adds to its sequence's budget, up to a limit. Common masks take
# 0.02 to 2 ms; a grammar that keeps costing more would delay every other sequence of the step.
_EARNED_PER_ROW_S = 0.005
_MAX_SAVED_S = 0.5


class GrammarRule:
    """A constraint applied to one sequence.

    Args:
        grammar: compiled for the target's tokenizer.
        end_token_ids: tokens that end the sequence, including the grammar's own end tokens. They are allowed
            wherever the text may end, and are the only allowed tokens where it must.
        resumed: tokens that the sequence generated at another verifier before.

    Raises:
        RuleError: the resumed tokens do not belong to the grammar.
    """

    def __init__(
        self, grammar: CompiledGrammar, end_token_ids: Iterable[int], resumed: Sequence[int] = ()
    ) -> None:
        self._grammar = grammar
        self._ends = frozenset(end_token_ids)
        if not grammar.end_token_ids <= self._ends:
            raise ValueError("the end tokens of the grammar must end the sequence, too")
        self._num_words = num_words(grammar.vocab_size)
        self._end_bits = np.zeros(self._num_words, dtype=np.int32)
        for token in self._ends:
            self._end_bits.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._own_end = min(grammar.end_token_ids)
        self._matcher = grammar.start()
        self._committed: list[int] = []
        self._path: tuple[int, ...] = ()  # what the matcher has taken in beyond the committed tokens
        self._saved_s = _MAX_SAVED_S
        self.commit(resumed)

    def keep(self, tree: DraftTree) -> DraftTree:
        """The nodes that the grammar allows. A drafter does not know the grammar, and each forbidden node costs a
        row.
        """
        if not len(tree):
            return tree
        started_s = time.thread_time()
        try:
            with self._guarded():
                kept = self._allowed_nodes(tree)
        except RuleError:  # `apply` meets the same error, and there the sequence can be ended
            return tree
        finally:
            self._saved_s -= time.thread_time() - started_s
        return tree.only(kept)

    def apply(self, logits: Tensor, tree: DraftTree) -> None:
        """Mask the root's row and the row of every reachable node; see `LogitRule.apply`.

        Raises:
            RuleError: no token can follow, or masks take more time than a sequence may use.
        """
        started_s = time.thread_time()
        allowed = np.full((1 + len(tree), self._num_words), -1, dtype=np.int32)
        with self._guarded():
            self._mask_root(allowed[0])
            self._mask_nodes(allowed, tree)
            self._move_to(())
        forbid(logits, allowed)
        self._let_end(logits, allowed)
        self._pay(time.thread_time() - started_s, 1 + len(tree))

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance over committed tokens; a token that ends the sequence is not part of the text.

        Raises:
            RuleError: a token is not allowed; the masks left no allowed token.
        """
        text = []
        for token in tokens:
            if token in self._ends:
                break
            text.append(token)
        with self._guarded():
            self._move_to(())
            if not self._matcher.consume_tokens(text) and not self._begin_again((*self._committed, *text)):
                raise self._error("nothing that it allows is left to choose from")
        self._committed += text

    def _mask_root(self, row: NDArray[np.int32]) -> None:
        if not self._mask_behind((), row):
            raise self._error(f"the text cannot go on: {shortened(self._matcher.get_error())}")

    def _mask_behind(self, path: tuple[int, ...], row: NDArray[np.int32]) -> bool:
        """Mask the row after a drafted path; False if no token can follow."""
        if self._move_to(path) and self._fill(row):
            return True
        # State from drafts counts towards the matcher's limits; a fresh matcher may still succeed.
        return self._begin_again(self._committed) and self._move_to(path) and self._fill(row)

    def _mask_nodes(self, allowed: NDArray[np.int32], tree: DraftTree) -> None:
        """Depth first, so that every step of the matcher advances by one token or rolls back.

        Rows of unreachable nodes are left unmasked.
        """
        children = _children(tree)
        paths: list[tuple[int, ...]] = [()] * (1 + len(tree))
        pending = children[0][::-1]
        while pending:
            node = pending.pop()
            token, parent_row = tree.tokens[node], 1 + tree.parents[node]
            if token in self._ends or not _has(allowed[parent_row], token):
                continue
            paths[1 + node] = (*paths[parent_row], token)
            if self._mask_behind(paths[1 + node], allowed[1 + node]):
                pending += children[1 + node][::-1]
            else:  # a dead end: no token can be chosen here, and the sequence ends when the node is committed
                allowed[1 + node] = 0
                self._begin_again(self._committed)

    def _allowed_nodes(self, tree: DraftTree) -> list[int]:
        """The same order, without masks."""
        children = _children(tree)
        paths: list[tuple[int, ...]] = [()] * (1 + len(tree))
        kept = []
        pending = children[0][::-1]
        while pending:
            node = pending.pop()
            token, above = tree.tokens[node], paths[1 + tree.parents[node]]
            self._move_to(above)
            if token in self._ends:
                if self._matcher.is_accepting():
                    kept.append(node)
            elif self._matcher.validate_tokens([token]) == 1:
                kept.append(node)
                paths[1 + node] = (*above, token)
                pending += children[1 + node][::-1]
            if self._matcher.is_error():
                self._begin_again(self._committed)
        self._move_to(())
        return sorted(kept)

    def _fill(self, row: NDArray[np.int32]) -> bool:
        """Write the mask of the matcher's state into a row; False if there is none."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        if self._matcher.is_error():
            return False
        row[:] = mask[: self._num_words]
        if _has(row, self._own_end):
            row |= self._end_bits
        return True

    def _let_end(self, logits: Tensor, allowed: NDArray[np.int32]) -> None:
        """Where only the end is allowed, no other rule (such as a least number of tokens) may forbid it."""
        is_over = ~(allowed & ~self._end_bits).any(axis=1) & allowed.any(axis=1)
        ends = sorted(self._ends)
        for row in np.flatnonzero(is_over).tolist():
            logits[row, ends] = logits[row, ends].nan_to_num(neginf=0.0)

    def _move_to(self, path: tuple[int, ...]) -> bool:
        """Move the matcher to the state after a drafted path; False if it does not accept the path."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if len(self._path) > shared:
            self._matcher.rollback(len(self._path) - shared)
        self._path = path
        return len(path) == shared or self._matcher.consume_tokens(list(path[shared:]))

    def _begin_again(self, text: Sequence[int]) -> bool:
        """A new matcher after a text; a matcher never recovers from an error."""
        self._matcher, self._path = self._grammar.start(), ()
        return self._matcher.consume_tokens(list(text))

    def _pay(self, spent_s: float, num_rows: int) -> None:
        self._saved_s = min(_MAX_SAVED_S, self._saved_s + num_rows * _EARNED_PER_ROW_S) - spent_s
        if self._saved_s < 0:
            raise self._error("is too complex: its masks take too long")

    def _error(self, message: str) -> RuleError:
        return RuleError(f"constraint.{self._grammar.kind}", message)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """A panic of the library ends this sequence, not the loop. Panics do not derive from Exception."""
        try:
            yield
        except RuleError:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            raise self._error(f"failed: {shortened(str(error))}") from error


def _children(tree: DraftTree) -> list[list[int]]:
    """The root's children, then every node's."""
    children: list[list[int]] = [[] for _ in range(1 + len(tree))]
    for node, parent in enumerate(tree.parents):
        children[1 + parent].append(node)
    return children


def _has(row: NDArray[np.int32], token: int) -> bool:
    return bool(int(row[token >> 5]) >> (token & 31) & 1)
