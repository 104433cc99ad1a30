"""Structured output: the completion belongs to a formal language, whatever is drafted.

`forms` writes a request's constraint as a grammar, `compiler` compiles it for one tokenizer, `rule` masks a
sequence's logits with it. A grammar is text from an untrusted client, and compiling it recurses deeply. So
`checker` has every new one tried first in a child process (`trial`), where a grammar that never ends, or
overflows the stack, harms nobody.

Grammars and masks are the library llguidance's (MIT): Earley parsing over a lexer of regular-expression
derivatives, walked along a trie of the vocabulary. Names are loaded on first use, so that a process without
torch or llguidance (the gateway) can check constraints.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.grammar.checker import GrammarChecker
    from paceline.grammar.compiler import CompiledGrammar, GrammarCompiler
    from paceline.grammar.refusal import ConstraintError
    from paceline.grammar.rule import GrammarRule

_HOMES = {
    "CompiledGrammar": "compiler",
    "ConstraintError": "refusal",
    "GrammarChecker": "checker",
    "GrammarCompiler": "compiler",
    "GrammarRule": "rule",
}

__all__ = ["CompiledGrammar", "ConstraintError", "GrammarChecker", "GrammarCompiler", "GrammarRule"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
