"""A constraint as llguidance reads it.

Responsible for: one grammar text for each form, and refusing what the library would ignore. Deliberately does not know:
tokenizers, masks. Called by `compiler`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from paceline.grammar.refusal import ConstraintError
from paceline.sampling.params import Constraint, ConstraintKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

JSON_WHITESPACE = r"[ \n\r\t]{1,20}"
"""Between two tokens of a JSON text. Bounded, since small models like to go on with spaces for ever."""

# Sampling belongs to the request, and text once committed is never taken back.
_RULE_OPTIONS = re.compile(
    r"^[ \t]*[?!]?[\w-]+\[[^\]\n]*\b(temperature|max_tokens|stop)[ \t]*=", re.MULTILINE
)


def grammar_text(constraint: Constraint) -> str:
    """The constraint as a grammar for `LLMatcher`; whether it is a sound one shows when it is compiled.

    Raises:
        ConstraintError: it cannot be written as a grammar at all.
    """
    kind, text = constraint.kind, constraint.text
    if kind is ConstraintKind.JSON_OBJECT:
        return _json_grammar(kind, '{"type": "object"}')
    if kind is ConstraintKind.JSON_SCHEMA:
        return _json_grammar(kind, text)
    if kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(text)
    if kind is ConstraintKind.CHOICE:
        # A JSON string is a string of Lark, too.
        literals = (json.dumps(choice, ensure_ascii=False) for choice in constraint.choices)
        return LLMatcher.grammar_from_lark("start: " + "\n  | ".join(literals))
    option = _RULE_OPTIONS.search(text)
    if option is not None:
        raise ConstraintError(kind, f"a rule cannot set {option.group(1)} here; the request does")
    return LLMatcher.grammar_from_lark(text)


def _json_grammar(kind: ConstraintKind, schema: str) -> str:
    """With white space bounded, unless the schema itself says what there may be (llguidance's top-level x-guidance)."""
    try:
        parsed = json.loads(schema)
        options = parsed.get("x-guidance") if isinstance(parsed, dict) else None
        asked = options if isinstance(options, dict) else {}
        for name in ("lenient", "coerce_one_of"):
            if asked.get(name):
                raise ConstraintError(
                    kind, f"x-guidance cannot set {name}: what cannot be enforced is refused"
                )
        has_own = "whitespace_flexible" in asked or "whitespace_pattern" in asked
        defaults: JsonCompileOptions = {} if has_own else {"whitespace_pattern": JSON_WHITESPACE}
        return LLMatcher.grammar_from_json_schema(schema, defaults=defaults)
    except ConstraintError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConstraintError(kind, f"is not a JSON Schema: {error}") from None
