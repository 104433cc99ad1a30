"""Grammars over the default model's real tokenizer, with a vocabulary a little larger than the tokenizer's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from paceline.grammar.checker import GrammarChecker
from paceline.grammar.compiler import CompiledGrammar, GrammarCompiler
from paceline.models import resolve
from paceline.sampling.params import Constraint, ConstraintKind

VOCAB_SIZE = 49_152 + 24
END = 2

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["cook", "baker", "driver"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "json_schema": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(PERSON)),
    "json_object": Constraint(ConstraintKind.JSON_OBJECT),
    "regex": Constraint(ConstraintKind.REGEX, r"[A-Z][a-z]{2,5}(-\d{1,3})?"),
    "choice": Constraint(ConstraintKind.CHOICE, choices=("yes", "yes please", "no", "ämter 😀")),
    "grammar": Constraint(
        ConstraintKind.GRAMMAR, 'start: sum\nsum: term ("+" term)*\nterm: /[0-9]+/ | "(" sum ")"'
    ),
}
TEXTS = {
    "json_schema": '{"name": "Bob", "age": 41, "role": "cook"}',
    "json_object": '{"a": [1, 2.5, {"b": null}], "ä": "\\n"}',
    "regex": "Paris-75",
    "choice": "yes please",
    "grammar": "12+(3+(45))+6",
}


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def compiler(model_dir: Path) -> GrammarCompiler:
    return GrammarCompiler.load(model_dir, VOCAB_SIZE, [END])


@pytest.fixture(scope="session")
def compiled(compiler: GrammarCompiler) -> Callable[[Constraint], CompiledGrammar]:
    return compiler.compile


@pytest.fixture(scope="session")
def checker(model_dir: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(model_dir, VOCAB_SIZE, [END])
    yield checker
    checker.close()
