"""Constraints over real gRPC: the text stays inside its grammar whatever is drafted, and a bad grammar fails alone."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from paceline.v1 import peer_pb2, sampling_pb2, target_pb2
from services.runtime.process import Process
from tests.gateway.tiny_model import byte_level_tokenizer
from tests.verifier.conductor import Conductor
from tests.verifier.conftest import save_target, serving

VOCAB_SIZE = 300
EOS = 1
PROMPT = [5, 9, 17, 3]
PATTERN = r"[a-f]{6,30}(-\d{2,9}){2}"
SLOW_REGEX = "a?" * 30_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def byte_target_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A random target whose tokens are bytes and a few words, in a vocabulary larger than the tokenizer's."""
    return save_target(tmp_path_factory.mktemp("bytes"), VOCAB_SIZE, tokenizer, EOS)


@pytest.fixture
async def verifier(byte_target_dir: Path) -> AsyncIterator[Process]:
    async with serving(byte_target_dir) as process:
        yield process


def opening(seed: int | None = None, **form: Any) -> dict[str, Any]:
    sampling = sampling_pb2.SamplingParams(
        temperature=0.0 if seed is None else 1.5,
        seed=seed or 0,
        constraint=sampling_pb2.Constraint(**form),
    )
    return {"sampling": sampling, "stop_token_ids": [EOS]}


def drafts(sequence_id: int, start: int, tokens: list[int]) -> peer_pb2.DraftBatch:
    return peer_pb2.DraftBatch(
        sequence_ids=[sequence_id],
        epochs=[0],
        starts=[start],
        sizes=[len(tokens)],
        tokens=tokens,
        parents=range(-1, len(tokens) - 1),
        log_probs=[-0.1] * len(tokens),
    )


@pytest.mark.parametrize("seed", [None, 3, 4])
async def test_the_text_belongs_to_the_grammar_whatever_is_drafted(
    verifier: Process, tokenizer: Tokenizer, seed: int | None
) -> None:
    chance = random.Random(seed)
    async with Conductor(verifier.port) as conductor:
        plain = await conductor.open(PROMPT, 150, **opening(seed, regex=PATTERN))
        [text] = await conductor.finish(plain)
        assert conductor.finished[plain] == sampling_pb2.FINISH_REASON_STOP
        assert text[-1] == EOS
        assert re.fullmatch(PATTERN, tokenizer.decode(text))
        sequence = await conductor.open(PROMPT, 150, **opening(seed, regex=PATTERN))
        while sequence not in conductor.finished:
            offset = chance.randrange(len(text))
            # The truth, spoilt at random places with tokens that the grammar forbids, or does not.
            tokens = [
                t if chance.random() < 0.8 else chance.randrange(VOCAB_SIZE) for t in text[offset:][:12]
            ]
            await conductor.send(drafts=drafts(sequence, len(PROMPT) + offset, tokens))
            await conductor.read_frame()
        assert conductor.tokens[sequence] == text


async def test_a_resumed_sequence_goes_on_where_it_was(verifier: Process) -> None:
    async with Conductor(verifier.port) as conductor:
        whole = await conductor.open(PROMPT, 60, **opening(7, regex=PATTERN))
        [text] = await conductor.finish(whole)
        for cut in (1, len(text) // 2, len(text) - 1):
            rest = await conductor.open(
                PROMPT + text[:cut], 60, num_resumed_tokens=cut, epoch=1, **opening(7, regex=PATTERN)
            )
            assert await conductor.finish(rest) == [text[cut:]]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (opening(regex="("), "sampling.constraint.regex"),
        (opening(json_schema="{"), "sampling.constraint.json_schema"),
        (opening(json_schema='{"not": {}}'), "sampling.constraint.json_schema"),
        (opening(grammar="start: a"), "sampling.constraint.grammar"),
        (opening(regex=SLOW_REGEX), "sampling.constraint.regex"),
        (opening(choice={}), "sampling.constraint.choice"),
        ({**opening(regex="a+"), "stop_token_ids": [7]}, "stop_token_ids"),
        ({**opening(regex="a+"), "num_resumed_tokens": 2}, "sampling.constraint.regex"),
    ],
)
async def test_a_bad_constraint_fails_alone_and_is_named(
    verifier: Process, tokenizer: Tokenizer, fields: dict[str, Any], named: str
) -> None:
    async with Conductor(verifier.port) as conductor:
        running = await conductor.open(PROMPT, 100, **opening(regex=PATTERN))
        assert await conductor.open(PROMPT, 100, **fields) == 0
        [failure] = conductor.failures
        assert failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert failure.message.startswith(f"{named}: ")
        [text] = await conductor.finish(running)
        assert re.fullmatch(PATTERN, tokenizer.decode(text))


async def test_a_grammar_that_turns_out_to_lead_nowhere_ends_its_sequence_alone(
    verifier: Process, tokenizer: Tokenizer
) -> None:
    dead_end = 'start: "abc" dead\ndead: dead "d"'
    async with Conductor(verifier.port) as conductor:
        running = await conductor.open(PROMPT, 100, **opening(regex=PATTERN))
        dead = await conductor.open(PROMPT, 100, **opening(grammar=dead_end))
        [tokens] = await conductor.finish(dead)
        assert tokenizer.decode(tokens) == "abc"
        [failure] = conductor.failures
        assert failure.sequence_id == dead
        assert failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert failure.message.startswith("sampling.constraint.grammar: the text cannot go on")
        [text] = await conductor.finish(running)
        assert re.fullmatch(PATTERN, tokenizer.decode(text))


async def test_nothing_else_on_the_stream_waits_for_a_grammar(verifier: Process) -> None:
    async with Conductor(verifier.port) as conductor:
        slow = target_pb2.OpenSequence(
            key=99, prompt_token_ids=PROMPT, max_new_tokens=9, **opening(regex=SLOW_REGEX)
        )
        await conductor.send(opens=[slow])
        plain = await conductor.open(PROMPT, 20)
        await conductor.finish(plain)
        assert not conductor.failures
        await conductor.read_until(lambda: conductor.failures)
        assert conductor.failures[0].key == 99


async def test_what_a_closed_stream_still_wanted_is_never_opened(verifier: Process) -> None:
    async with Conductor(verifier.port) as conductor:
        for key in range(1, 8):
            wanted = opening(regex=f"[ab]{{180}}{key}")
            asked = target_pb2.OpenSequence(key=key, prompt_token_ids=PROMPT, max_new_tokens=190, **wanted)
            await conductor.send(opens=[asked])
        await conductor.read_until(lambda: conductor.opened)
    async with Conductor(verifier.port) as conductor:
        # Its grammar stands behind all of those in the queue, and its text is shorter than theirs.
        sequence = await conductor.open(PROMPT, 60, **opening(regex="[ab]{150}"))
        await conductor.finish(sequence)
        assert conductor.steps[-1].num_sequences == 1
