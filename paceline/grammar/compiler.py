"""Compiles constraints for one tokenizer.

Responsible for: the tokenizer's bytes from tokenizer.json (no transformers needed), the limits of size and
memory, and rejecting a grammar that matches no text. Deliberately does not know: sequences, logits, caches.
Compiling takes about a millisecond for a common schema, and may take seconds, or kill the process, for a
hostile one: see `checker`.

Called by: `check_process`, and by the verifier on a thread other than its step loop's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from paceline.grammar.forms import grammar_text
from paceline.grammar.refusal import ConstraintError
from paceline.sampling.params import Constraint, ConstraintKind

# Limits: symbols of a grammar, and states of its lexer at 1 to 2 KB each, for every running sequence. The
# fuel of a step lasts llguidance some 15 ms. Verbose errors quote the parser's state and would put clients'
# text into logs.
_LIMITS = LLParserLimits(
    max_grammar_size=100_000, max_lexer_states=20_000, step_lexer_fuel=200_000, verbose_errors=False
)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar in its initial state; every sequence gets a copy.

    Attributes:
        kind: form of the constraint, for errors.
        vocab_size: columns of the target's logits; ids beyond the tokenizer's own are never allowed.
        end_token_ids: what a mask allows where the text may end.
    """

    kind: ConstraintKind
    vocab_size: int
    end_token_ids: frozenset[int]
    matcher: LLMatcher

    def start(self) -> LLMatcher:
        """A matcher in the initial state that shares nothing mutable; takes some 20 microseconds."""
        return self.matcher.deep_copy()


class GrammarCompiler:
    """Compiles for one model.

    Args:
        tokenizer_json: text of the model's tokenizer.json.
        vocab_size: columns of its logits.
        end_token_ids: its end tokens, at least one.

    Raises:
        ValueError: llguidance cannot read the tokenizer, or there is no end token.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        if not end_token_ids:
            raise ValueError("the model names no end token: without one no text can end")
        self._vocab_size = vocab_size
        self._end_token_ids = frozenset(end_token_ids)
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(end_token_ids))

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int, end_token_ids: Sequence[int]) -> GrammarCompiler:
        """Reads ``tokenizer.json``; a few tenths of a second."""
        text = (model_dir / "tokenizer.json").read_text(encoding="utf-8")
        return cls(text, vocab_size, end_token_ids)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """A grammar that matches at least one text.

        Raises:
            ConstraintError: a syntax error, an unsupported feature, a limit, or no text at all.
        """
        matcher = LLMatcher(self._tokenizer, grammar_text(constraint), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            # The library's message then names an option of its own, which a request cannot set.
            raise ConstraintError(constraint.kind, matcher.get_error().split(" Enable 'coerce_one_of'")[0])
        matcher.compute_bitmask()
        if is_dead_end(matcher):
            raise ConstraintError(constraint.kind, "matches no text")
        if matcher.is_error():
            raise ConstraintError(constraint.kind, f"is too complex: {matcher.get_error()}")
        return CompiledGrammar(constraint.kind, self._vocab_size, self._end_token_ids, matcher)


def is_dead_end(matcher: LLMatcher) -> bool:
    """Whether a matcher stopped because no token can follow; its other errors are limits."""
    return matcher.is_error() and matcher.get_error().startswith("NoExtension")
