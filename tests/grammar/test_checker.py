"""Hostile and wrong grammars are refused by name, each alone, and sound ones pass right behind them."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from paceline.grammar.cache import ConstraintCache
from paceline.grammar.checker import GrammarChecker
from paceline.grammar.refusal import ConstraintError
from paceline.sampling.params import Constraint, ConstraintKind
from tests.grammar.conftest import CONSTRAINTS, END, VOCAB_SIZE

REGEX, SCHEMA, GRAMMAR = ConstraintKind.REGEX, ConstraintKind.JSON_SCHEMA, ConstraintKind.GRAMMAR
NUM = 60_000


def nested(depth: int) -> str:
    return '{"type":"object","required":["a"],"properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


REFUSED = {
    "a parenthesis left open": (REGEX, "(", "invalid regex"),
    "look-ahead": (REGEX, "(?=a)b", "look-around"),
    "a back-reference": (REGEX, r"(a)\1", "backreferences"),
    "parentheses 30,000 deep": (REGEX, "(" * (NUM // 2) + "a" + ")" * (NUM // 2), "invalid regex"),
    "30,000 optional letters": (REGEX, "a?" * (NUM // 2), "too complex"),
    "a repetition of repetitions": (REGEX, "(a{1000}){1000}", "too complex"),
    "long runs of character classes": (REGEX, r"(\p{L}|\p{N}|\w)*" * 3000, "too complex"),
    "no JSON": (SCHEMA, '{"type', "not a JSON Schema"),
    "JSON 60,000 deep": (SCHEMA, "[" * NUM, "recursion"),
    "a schema 1,000 deep": (SCHEMA, nested(1000), "recursion"),
    "a keyword that is not supported": (SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "a format that is not known": (SCHEMA, '{"type": "string", "format": "poem"}', "poem"),
    "a oneOf that may overlap": (
        SCHEMA,
        '{"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}',
        "oneOf",
    ),
    "leniency is not the request's to ask for": (
        SCHEMA,
        '{"x-guidance": {"lenient": true}, "not": {"type": "string"}}',
        "lenient",
    ),
    "a schema of itself": (SCHEMA, '{"$ref": "#"}', "matches no text"),
    "nothing allowed": (SCHEMA, "false", "object schema"),
    "a reference to elsewhere": (SCHEMA, '{"$ref": "http://127.0.0.1:1/x"}', "registry"),
    "alternatives that multiply": (
        SCHEMA,
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(4)]}
                    for i in range(12)
                ]
            }
        ),
        "too large",
    ),
    "no start": (GRAMMAR, 'begin: "a"', "start"),
    "an unknown rule": (GRAMMAR, "start: foo", "foo"),
    "recursion without an end": (GRAMMAR, 'start: start "a"', "matches no text"),
    "a terminal of itself": (GRAMMAR, 'start: A\nA: A "b" | "c"', "circular"),
    "brackets 30,000 deep": (GRAMMAR, "start: " + "[" * (NUM // 2) + '"a"' + "]" * (NUM // 2), "nested"),
    # This one overruns the stack of whoever compiles it.
    "4,000 rules in a row": (
        GRAMMAR,
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(4000)) + '\na4000: "x"',
        "too complex",
    ),
    "a terminal that doubles 3,000 times": (
        GRAMMAR,
        "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(3000)) + '\nA3000: "x"',
        "too complex",
    ),
    "an intersection of 300": (
        GRAMMAR,
        "start: A\nA: " + " & ".join(f"/.*{i}.*/" for i in range(300)),
        "too complex",
    ),
    "thousands of terminals at once": (
        GRAMMAR,
        "start: " + " | ".join(f"/.*{i}.*/" for i in range(4000)),
        "too complex",
    ),
    "sampling inside a grammar": (GRAMMAR, "start: a\na[temperature=0.5]: /.*/", "temperature"),
    "a token past the vocabulary": (GRAMMAR, "start: <[99999]>", "too large"),
}


@pytest.mark.parametrize(("kind", "text", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(checker: GrammarChecker, kind: ConstraintKind, text: str, reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason) as caught:
        checker.check(Constraint(kind, text))
    assert caught.value.field == f"constraint.{kind}"
    assert len(caught.value.description) < 400
    with pytest.raises(ConstraintError, match=reason):  # remembered
        checker.check(Constraint(kind, text))
    checker.check(CONSTRAINTS["json_schema"])


@pytest.mark.parametrize("form", sorted(CONSTRAINTS))
def test_sound_ones_pass(checker: GrammarChecker, form: str) -> None:
    checker.check(CONSTRAINTS[form])


def test_the_largest_of_what_is_common_passes(checker: GrammarChecker) -> None:
    checker.check(Constraint(ConstraintKind.CHOICE, choices=tuple(f"choice {i}" for i in range(1024))))
    checker.check(Constraint(SCHEMA, nested(40)))
    wide = {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(150)}}
    checker.check(Constraint(SCHEMA, json.dumps({**wide, "required": list(wide["properties"])})))


def test_a_child_that_dies_is_replaced(model_dir: Path) -> None:
    checker = GrammarChecker(model_dir, VOCAB_SIZE, [END])
    try:
        checker.check(CONSTRAINTS["regex"])
        child = checker._child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        checker.check(CONSTRAINTS["choice"])
        assert checker._child is not child
    finally:
        checker.close()


def test_a_verdict_is_looked_up_from_many_threads_and_tried_once(model_dir: Path) -> None:
    checker = GrammarChecker(model_dir, VOCAB_SIZE, [END])
    refusals: list[str] = []

    def ask() -> None:
        try:
            checker.check(Constraint(REGEX, "("))
        except ConstraintError as error:
            refusals.append(error.description)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        checker.close()
    assert len(refusals) == 8
    assert len(set(refusals)) == 1


def test_without_a_tokenizer_it_says_so(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path, VOCAB_SIZE, [END])
    with pytest.raises(ConstraintError, match=r"tokenizer\.json"):
        checker.check(CONSTRAINTS["regex"])


def test_a_model_without_an_end_token_cannot_have_constraints(model_dir: Path) -> None:
    with pytest.raises(ConstraintError, match="end token"):
        GrammarChecker(model_dir, VOCAB_SIZE, []).check(CONSTRAINTS["regex"])


def test_the_cache_keeps_to_its_bounds_and_drops_what_was_used_last() -> None:
    cache: ConstraintCache[int] = ConstraintCache(max_entries=3, max_text_bytes=100)
    constraints = [Constraint(REGEX, f"{i}" * 10) for i in range(5)]
    for place, constraint in enumerate(constraints[:3]):
        cache.put(constraint, place)
    assert cache.get(constraints[0]) == 0
    cache.put(constraints[3], 3)
    assert cache.get(constraints[1]) is None
    assert cache.get(constraints[0]) == 0
    assert (len(cache), cache._num_text_bytes) == (3, 30)
    cache.put(constraints[3], 4)
    assert (len(cache), cache._num_text_bytes, cache.get(constraints[3])) == (3, 30, 4)
    cache.put(Constraint(REGEX, "x" * 95), 9)
    assert (len(cache), cache._num_text_bytes) == (1, 95)
    cache.put(Constraint(ConstraintKind.CHOICE, choices=("ä" * 40, "b" * 30)), 1)
    assert (len(cache), cache._num_text_bytes) == (0, 0)
