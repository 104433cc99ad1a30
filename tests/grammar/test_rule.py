"""Masks follow the text, and the text alone: each row as if its path had been walked token by token."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor

from paceline.draft_tree import EMPTY_TREE, DraftTree
from paceline.grammar import rule as rule_module
from paceline.grammar.compiler import CompiledGrammar, GrammarCompiler
from paceline.grammar.rule import GrammarRule
from paceline.sampling.params import Constraint, ConstraintKind
from paceline.sampling.rules import RuleError
from tests.grammar.conftest import CONSTRAINTS, END, PERSON, TEXTS, VOCAB_SIZE

ROW = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
FORMS = sorted(CONSTRAINTS)


@pytest.fixture(scope="session")
def grammars(compiler: GrammarCompiler) -> dict[str, CompiledGrammar]:
    return {form: compiler.compile(constraint) for form, constraint in CONSTRAINTS.items()}


def begin(
    grammar: CompiledGrammar, resumed: list[int] | None = None, ends: set[int] | None = None
) -> GrammarRule:
    return GrammarRule(grammar, ends or {END}, resumed or [])


def root_row(rule: GrammarRule) -> Tensor:
    logits = ROW.repeat(1, 1)
    rule.apply(logits, EMPTY_TREE)
    return logits[0]


def allowed(row: Tensor) -> list[int]:
    return torch.nonzero(row != -torch.inf).flatten().tolist()


def tree_of(parents: list[int], tokens: list[int]) -> DraftTree:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return DraftTree(
        tuple(tokens), tuple(parents), tuple(depths), (0.5,) * len(tokens), (None,) * len(tokens)
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_text_of_the_language_is_allowed_token_by_token_and_then_ends(
    grammars: dict[str, CompiledGrammar], tokenizer: Tokenizer, form: str
) -> None:
    rule = begin(grammars[form])
    for token in tokenizer.encode(TEXTS[form]).ids:
        row = root_row(rule)
        assert row[token] == ROW[token]
        assert form not in ("json_schema", "json_object") or row[END] == -torch.inf
        rule.commit([token])
    assert END in allowed(root_row(rule))
    rule.commit([END])


@pytest.mark.parametrize("form", ["json_schema", "json_object", "choice"])
def test_behind_a_whole_text_nothing_but_the_end_is_left(
    grammars: dict[str, CompiledGrammar], tokenizer: Tokenizer, form: str
) -> None:
    stop = tokenizer.token_to_id("Ġstop")
    rule = begin(grammars[form], ends={END, stop})
    rule.commit(tokenizer.encode(TEXTS[form]).ids)
    assert allowed(root_row(rule)) == sorted({END, stop})


def test_a_stop_token_of_the_request_is_allowed_only_where_the_text_may_end(
    grammars: dict[str, CompiledGrammar], tokenizer: Tokenizer
) -> None:
    stop = tokenizer.token_to_id("Ġstop")
    rule = begin(grammars["regex"], ends={END, stop})
    assert {END, stop}.isdisjoint(allowed(root_row(rule)))
    rule.commit(tokenizer.encode("Paris").ids)
    assert {END, stop} <= set(allowed(root_row(rule)))
    rule.commit([stop])


def test_what_the_tokenizer_does_not_have_is_never_allowed(grammars: dict[str, CompiledGrammar]) -> None:
    assert max(allowed(root_row(begin(grammars["json_object"])))) < 49_152


def test_the_end_stays_possible_where_another_rule_forbids_it(
    grammars: dict[str, CompiledGrammar], tokenizer: Tokenizer
) -> None:
    rule = begin(grammars["choice"], resumed=tokenizer.encode("no").ids)
    logits = ROW.repeat(1, 1)
    logits[:, END] = -torch.inf
    rule.apply(logits, EMPTY_TREE)
    assert allowed(logits[0]) == [END]
    going_on = begin(grammars["choice"], resumed=tokenizer.encode("yes").ids)
    logits = ROW.repeat(1, 1)
    logits[:, END] = -torch.inf
    going_on.apply(logits, EMPTY_TREE)
    assert END not in allowed(logits[0])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), form=st.sampled_from(FORMS), num_nodes=st.integers(0, 24))
def test_a_row_is_the_one_that_its_path_alone_gives(
    grammars: dict[str, CompiledGrammar], seed: int, form: str, num_nodes: int
) -> None:
    chance = random.Random(seed)
    grammar = grammars[form]
    rule = begin(grammar)
    committed = walk(grammar, [], chance, chance.randrange(12))
    rule.commit(committed)
    # Three rounds on one rule, so that what it remembers of one tree meets the next.
    for _ in range(3):
        parents, tokens, paths = grow(grammar, committed, chance, num_nodes)
        logits = ROW.repeat(1 + len(tokens), 1)
        rule.apply(logits, tree_of(parents, tokens))
        assert torch.equal(logits[0], root_row(begin(grammar, committed)))
        for node, path in enumerate(paths):
            if path is not None:
                assert torch.equal(logits[1 + node], root_row(begin(grammar, [*committed, *path])))
        kept = rule.keep(tree_of(parents, tokens))
        expected = [
            node
            for node in range(len(tokens))
            if paths[node] is not None or is_end(grammar, committed, paths, parents, tokens, node)
        ]
        assert kept == tree_of(parents, tokens).only(expected)
        step = walk(grammar, committed, chance, chance.randrange(4))
        rule.commit(step)
        committed = committed + step


def is_end(
    grammar: CompiledGrammar,
    committed: list[int],
    paths: list[list[int] | None],
    parents: list[int],
    tokens: list[int],
    node: int,
) -> bool:
    """Whether a node proposes the end where the text may end."""
    above = [] if parents[node] < 0 else paths[parents[node]]
    return (
        tokens[node] == END
        and above is not None
        and END in allowed(root_row(begin(grammar, [*committed, *above])))
    )


def walk(grammar: CompiledGrammar, text: list[int], chance: random.Random, num_tokens: int) -> list[int]:
    """A random text that goes on from `text`, shorter where it ends."""
    rule, walked = begin(grammar, text), []
    for _ in range(num_tokens):
        choices = [token for token in allowed(root_row(rule)) if token != END]
        if not choices:
            break
        walked.append(chance.choice(choices))
        rule.commit(walked[-1:])
    return walked


def grow(
    grammar: CompiledGrammar, committed: list[int], chance: random.Random, num_nodes: int
) -> tuple[list[int], list[int], list[list[int] | None]]:
    """A random tree with forbidden branches; the path of each node that can be reached, None for the others."""
    parents: list[int] = []
    tokens: list[int] = []
    paths: list[list[int] | None] = []
    for node in range(num_nodes):
        parent = chance.randrange(-1, node)
        above = [] if parent < 0 else paths[parent]
        choices = [] if above is None else allowed(root_row(begin(grammar, [*committed, *above])))
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        choices = [token for token in choices if token not in taken]
        is_allowed = bool(choices) and chance.random() < 0.7
        token = chance.choice(choices) if is_allowed else chance.randrange(VOCAB_SIZE)
        while token in taken:  # a trie names each child once
            token = chance.randrange(VOCAB_SIZE)
        is_path = above is not None and token in choices and token != END
        parents.append(parent)
        tokens.append(token)
        paths.append([*above, token] if is_path and above is not None else None)
    return parents, tokens, paths


@pytest.mark.parametrize(
    ("options", "text", "is_json"),
    [
        ({}, '{"a":1}', True),
        ({}, '{\n  "a" : 1\n}', True),
        ({}, "{" + " " * 20 + '"a":1}', True),
        ({}, "{" + " " * 21 + '"a":1}', False),
        ({}, ' {"a":1}', False),
        ({}, '{"a":1} ', False),
        ({"whitespace_flexible": False}, '{"a":1}', True),
        ({"whitespace_flexible": False}, '{"a": 1}', False),
        ({"whitespace_pattern": "[ ]{1,2}"}, '{  "a":1}', True),
        ({"whitespace_pattern": "[ ]{1,2}"}, '{\n"a":1}', False),
    ],
)
def test_white_space_is_bounded_and_the_schemas_to_change(
    compiler: GrammarCompiler, tokenizer: Tokenizer, options: dict, text: str, is_json: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "x-guidance": options}
    rule = begin(compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))))
    if is_json:
        rule.commit(tokenizer.encode(text).ids)
        assert END in allowed(root_row(rule))
    else:
        with pytest.raises(RuleError):
            rule.commit(tokenizer.encode(text).ids)


def test_a_dead_end_among_the_drafts_changes_nothing_until_it_is_chosen(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(
        Constraint(ConstraintKind.GRAMMAR, 'start: "x" dead | "y" "z"\ndead: dead "a"')
    )
    x, y, z = (tokenizer.token_to_id(letter) for letter in "xyz")
    rule = begin(grammar)
    logits = ROW.repeat(4, 1)
    rule.apply(logits, tree_of([-1, -1, 1], [x, y, z]))
    assert y in allowed(logits[0])
    assert allowed(logits[1]) == []
    assert z in allowed(logits[2])
    assert allowed(logits[3]) == [END]
    rule.commit([y])
    assert z in allowed(root_row(rule))
    dead = begin(grammar)
    dead.commit([x])
    with pytest.raises(RuleError, match="cannot go on") as caught:
        root_row(dead)
    assert caught.value.field == "constraint.grammar"


def test_a_token_that_is_not_allowed_is_never_taken_in(grammars: dict[str, CompiledGrammar]) -> None:
    with pytest.raises(RuleError, match="nothing that it allows is left") as caught:
        begin(grammars["json_schema"]).commit([5])
    assert caught.value.field == "constraint.json_schema"


def test_a_resumed_sequence_stands_where_it_was(
    grammars: dict[str, CompiledGrammar], tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode(TEXTS["json_schema"]).ids
    for cut in range(len(tokens)):
        walked = begin(grammars["json_schema"])
        for token in tokens[:cut]:
            root_row(walked)
            walked.commit([token])
        assert torch.equal(root_row(begin(grammars["json_schema"], tokens[:cut])), root_row(walked))
    with pytest.raises(RuleError):
        begin(grammars["json_schema"], tokens[1:])


def test_masks_that_take_too_long_end_the_sequence(
    grammars: dict[str, CompiledGrammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_module, "_EARNED_PER_ROW_S", 0.0)
    monkeypatch.setattr(rule_module, "_MAX_SAVED_S", 0.0)
    with pytest.raises(RuleError, match="take too long"):
        root_row(begin(grammars["json_object"]))


def test_random_texts_are_valid(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {**PERSON, "required": ["name", "age", "role"]}
    grammar = compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
    for seed in range(30):
        text = walk(grammar, [], random.Random(seed), 400)
        jsonschema.validate(json.loads(tokenizer.decode(text)), schema)
