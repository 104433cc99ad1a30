"""Each parameter over real gRPC: a naive reference gives the same text and log-probabilities, drafted or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from paceline.target import SequenceRows, TargetEngine
from paceline.v1 import sampling_pb2, target_pb2
from services.runtime.process import Process
from tests.verifier.conductor import VOCAB_SIZE, Conductor
from tests.verifier.test_stream import PROMPT, SLOW_POLICY, long_drafts

Params = sampling_pb2.SamplingParams
NUM_TOKENS = 60
STOPS = [7, 30]


def reference(
    engine: TargetEngine, prompt: Sequence[int], params: Params, num_tokens: int, stops: Sequence[int] = ()
) -> tuple[list[int], list[list[float]]]:
    """Greedy text and the log-softmax of the target's own logits at each of its tokens, one token at a time."""
    slot = engine.open()
    tokens: list[int] = []
    rows: list[list[float]] = []
    fed = list(prompt)
    repetition = params.repetition_penalty or 1.0
    while len(tokens) < num_tokens:
        logits = engine.step([SequenceRows(slot, fed, num_logits="last")]).logits[0][-1]
        rows.append(logits.log_softmax(-1).tolist())
        values = logits.tolist()
        for run in params.bad_runs:
            ids = list(run.token_ids)
            if [*tokens, ids[-1]][-len(ids) :] == ids:
                values[ids[-1]] = -math.inf
        if len(tokens) < params.min_tokens:
            for stop in stops:
                values[stop] = -math.inf
        for token, bias in params.logit_bias.items():
            values[token] += bias
        for token in {*prompt, *tokens}:
            values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
            values[token] -= params.frequency_penalty * tokens.count(token)
            values[token] -= params.presence_penalty * (token in tokens)
        tokens.append(max(range(VOCAB_SIZE), key=lambda token: values[token]))
        fed = tokens[-1:]
        if tokens[-1] in stops:
            break
    engine.close(slot)
    return tokens, rows


PARAMETERS = {
    "nothing": Params(),
    "repetition": Params(repetition_penalty=1.6),
    "presence": Params(presence_penalty=1.7),
    "frequency": Params(frequency_penalty=0.9),
    "favour": Params(presence_penalty=-0.5, frequency_penalty=-0.2, repetition_penalty=0.8),
    "bias": Params(logit_bias={3: 6.5, 9: -100.0, 12: 5.0}),
    "min_tokens": Params(min_tokens=25),
    "everything": Params(
        repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={5: 4.0}, min_tokens=9
    ),
}


def with_runs(params: Params, text: Sequence[int]) -> Params:
    """Forbids pieces of what would be said."""
    changed = Params()
    changed.CopyFrom(params)
    for run in (text[2:4], text[6:7], text[9:12]):
        changed.bad_runs.add(token_ids=run)
    return changed


@pytest.mark.parametrize("has_runs", [False, True])
@pytest.mark.parametrize("name", PARAMETERS)
async def test_text_and_log_probs_are_the_references_plain_and_drafted(
    verifier: Process, engine: TargetEngine, name: str, has_runs: bool
) -> None:
    params = PARAMETERS[name]
    if has_runs:
        params = with_runs(params, reference(engine, PROMPT, params, NUM_TOKENS, STOPS)[0])
    text, rows = reference(engine, PROMPT, params, NUM_TOKENS, STOPS)
    params.temperature, params.seed = 0.0, 1
    fields: dict[str, Any] = {
        "sampling": params,
        "stop_token_ids": STOPS,
        "log_probs": sampling_pb2.LogProbOptions(num_top=3),
    }
    async with Conductor(verifier.port) as conductor:
        plain = await conductor.open(PROMPT, NUM_TOKENS, max_draft_nodes=0, **fields)
        await conductor.finish(plain)
        await conductor.send(policy=SLOW_POLICY)
        drafted = await conductor.open(PROMPT, NUM_TOKENS, **fields)
        await conductor.send(drafts=long_drafts(drafted, len(PROMPT), text))
        await conductor.finish(drafted)
        assert conductor.tokens[plain] == text
        assert conductor.tokens[drafted] == text
        if len(text) > 8:
            assert conductor.num_accepted > 0
        for sequence in (plain, drafted):
            assert_log_probs(conductor.log_probs[sequence], text, rows)


def assert_log_probs(
    reports: Sequence[target_pb2.SequenceLogProbs], text: Sequence[int], rows: Sequence[Sequence[float]]
) -> None:
    log_probs = [value for report in reports for value in report.committed.log_probs]
    ranks = [value for report in reports for value in report.committed.ranks]
    top_ids = [value for report in reports for value in report.committed.top_token_ids]
    top = [value for report in reports for value in report.committed.top_log_probs]
    assert log_probs == pytest.approx([row[token] for row, token in zip(rows, text, strict=True)], abs=1e-4)
    for place, (row, token) in enumerate(zip(rows, text, strict=True)):
        ordered = sorted(range(VOCAB_SIZE), key=lambda other: -row[other])
        assert ranks[place] == ordered.index(token) + 1
        assert top_ids[3 * place : 3 * place + 3] == ordered[:3]
        assert top[3 * place : 3 * place + 3] == pytest.approx([row[i] for i in ordered[:3]], abs=1e-4)


async def test_sampled_text_with_rules_is_the_same_plain_and_drafted(verifier: Process) -> None:
    sampling = Params(
        temperature=0.9,
        top_p=0.95,
        seed=5,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        logit_bias={4: 1.5},
    )
    async with Conductor(verifier.port) as conductor:
        options = sampling_pb2.LogProbOptions(num_top=0)
        plain = await conductor.open(PROMPT, 120, sampling=sampling, max_draft_nodes=0, log_probs=options)
        [text] = await conductor.finish(plain)
        await conductor.send(policy=SLOW_POLICY)
        drafted = await conductor.open(PROMPT, 120, sampling=sampling, log_probs=options)
        await conductor.send(drafts=long_drafts(drafted, len(PROMPT), text))
        await conductor.finish(drafted)
        assert conductor.tokens[drafted] == text
        assert conductor.num_accepted > 0
        values = [
            [value for report in conductor.log_probs[sequence] for value in report.committed.log_probs]
            for sequence in (plain, drafted)
        ]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
        assert len(values[0]) == 120


async def test_rejection_never_commits_a_drafted_token_that_is_forbidden(
    verifier: Process, engine: TargetEngine
) -> None:
    text, _ = reference(engine, PROMPT, Params(), 150)
    banned = sorted(set(text))[::3]
    async with Conductor(verifier.port) as conductor:
        await conductor.send(policy=SLOW_POLICY)
        for seed in range(3):
            sampling = Params(
                temperature=0.6,
                seed=seed,
                mode=sampling_pb2.VERIFY_MODE_REJECTION,
                bad_runs=[{"token_ids": [token]} for token in banned],
            )
            sequence = await conductor.open(PROMPT, 150, sampling=sampling)
            # Wrong from the first banned token on, and sent again from every place.
            for start in range(0, 140, 20):
                await conductor.send(
                    drafts=long_drafts(sequence, len(PROMPT) + start, text[start : start + 60])
                )
            [tokens] = await conductor.finish(sequence)
            assert len(tokens) == 150
            assert not set(tokens) & set(banned)
    assert sum(sum(step.num_draft_tokens) for step in conductor.steps) > 0


async def test_penalties_go_on_where_a_moved_sequence_was(verifier: Process, engine: TargetEngine) -> None:
    params = Params(
        presence_penalty=1.1, frequency_penalty=0.6, repetition_penalty=1.2, min_tokens=20, bad_runs=[]
    )
    params = with_runs(params, reference(engine, PROMPT, params, 40, STOPS)[0])
    text, _ = reference(engine, PROMPT, params, 40, STOPS)
    params.temperature = 0.0
    for num_resumed in (1, 5, 18):
        async with Conductor(verifier.port) as conductor:
            sequence = await conductor.open(
                PROMPT + text[:num_resumed],
                40,
                num_resumed_tokens=num_resumed,
                sampling=params,
                stop_token_ids=STOPS,
                epoch=1,
            )
            assert (await conductor.finish(sequence))[0] == text[num_resumed:]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sampling": Params(repetition_penalty=0.0)}, "sampling.repetition_penalty"),
        ({"sampling": Params(repetition_penalty=math.nan)}, "sampling.repetition_penalty"),
        ({"sampling": Params(presence_penalty=2.5)}, "sampling.presence_penalty"),
        ({"sampling": Params(frequency_penalty=math.inf)}, "sampling.frequency_penalty"),
        ({"sampling": Params(logit_bias={VOCAB_SIZE: 1.0})}, f"sampling.logit_bias[{VOCAB_SIZE}]"),
        ({"sampling": Params(logit_bias={1: 100.5})}, "sampling.logit_bias[1]"),
        (
            {"sampling": Params(bad_runs=[{"token_ids": [1]}, {"token_ids": [2, VOCAB_SIZE]}])},
            "sampling.bad_runs[1].token_ids[1]",
        ),
        ({"sampling": Params(bad_runs=[{}])}, "sampling.bad_runs[0].token_ids"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids[0]"),
        ({"log_probs": sampling_pb2.LogProbOptions(num_top=21)}, "log_probs.num_top"),
        ({"log_probs": sampling_pb2.LogProbOptions(num_prompt_top=10**6)}, "log_probs.num_prompt_top"),
    ],
)
async def test_a_bad_parameter_fails_alone_and_is_named(
    verifier: Process, fields: dict[str, Any], named: str
) -> None:
    async with Conductor(verifier.port) as conductor:
        assert await conductor.open(PROMPT, 4, **fields) == 0
        [failure] = conductor.failures
        assert failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert failure.message.startswith(f"{named}:")
