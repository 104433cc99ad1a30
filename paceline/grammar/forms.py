"""A constraint in the form that llguidance reads.

Responsible for: one grammar text for each form, and rejecting options that the library would ignore.
Deliberately does not know: tokenizers, masks. Called by `compiler`.
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
"""White space between two tokens of a JSON text. It is bounded, since small models tend to write spaces without
end.
"""

# The request sets sampling, and committed text is never retracted: so rules may not set these options.
_RULE_OPTIONS = re.compile(
    r"^[ \t]*[?!]?[\w-]+\[[^\]\n]*\b(temperature|max_tokens|stop)[ \t]*=", re.MULTILINE
)


def grammar_text(constraint: Constraint) -> str:
    """The constraint as a grammar for `LLMatcher`; compiling shows whether it is sound.

    Raises:
        ConstraintError: the constraint cannot be written as a grammar.
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
        raise ConstraintError(kind, f"a rule cannot set {option.group(1)} here; set it in the request")
    return LLMatcher.grammar_from_lark(text)


def _json_grammar(kind: ConstraintKind, schema: str) -> str:
    """With bounded white space, unless the schema itself defines it (llguidance's top-level x-guidance)."""
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
