"""The Verify stream over real gRPC: what is committed is the target's own text, whatever the drafts say."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.v1 import peer_pb2, sampling_pb2, target_pb2
from services.runtime import metrics
from services.runtime.process import Process
from tests.verifier.conductor import MAX_POSITIONS, VOCAB_SIZE, Conductor
from tests.verifier.conftest import serving

PROMPT = [5, 9, 17, 3]
SLOW_POLICY = peer_pb2.StepPolicy(
    version=1,
    max_nodes_per_step=64,
    max_nodes_per_sequence=8,
    wait_budget_us=200_000,
    max_prefill_tokens_per_step=512,
)


def drafts(sequence_id: int, start: int, tokens: list[int], epoch: int = 0) -> peer_pb2.DraftBatch:
    """One chain entry."""
    return peer_pb2.DraftBatch(
        sequence_ids=[sequence_id],
        epochs=[epoch],
        starts=[start],
        sizes=[len(tokens)],
        tokens=tokens,
        parents=range(-1, len(tokens) - 1),
        log_probs=[-0.1] * len(tokens),
    )


def long_drafts(sequence_id: int, start: int, text: list[int]) -> peer_pb2.DraftBatch:
    """The whole of a text as entries of at most 64 tokens, each from its own place on."""
    batch = peer_pb2.DraftBatch()
    for begin in range(0, len(text), 64):
        batch.MergeFrom(drafts(sequence_id, start + begin, text[begin : begin + 64]))
    return batch


async def test_plain_text_is_the_targets(verifier: Process, plain_text: Any) -> None:
    async with Conductor(verifier.port) as conductor:
        sequence = await conductor.open(PROMPT, 24)
        [tokens] = await conductor.finish(sequence)
        assert tokens == plain_text(PROMPT, 24)
        assert conductor.finished[sequence] == sampling_pb2.FINISH_REASON_LENGTH
        assert len(conductor.steps) == 24


async def test_right_drafts_save_passes(verifier: Process, plain_text: Any) -> None:
    text = plain_text(PROMPT, 190)
    async with Conductor(verifier.port) as conductor:
        await conductor.send(policy=SLOW_POLICY)
        sequence = await conductor.open(PROMPT, 190)
        # The whole text as one early entry: valid for as long as the target agrees with it.
        await conductor.send(drafts=long_drafts(sequence, len(PROMPT), text))
        [tokens] = await conductor.finish(sequence)
        assert tokens == text
        assert conductor.num_accepted >= 20
        assert len(conductor.steps) == 190 - conductor.num_accepted


async def test_any_drafts_leave_the_text_alone(verifier: Process, plain_text: Any) -> None:
    chance = random.Random(11)
    prompts = [[chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 12))] for _ in range(6)]
    expected = [plain_text(prompt, 32) for prompt in prompts]
    async with Conductor(verifier.port) as conductor:
        sequences = [await conductor.open(prompt, 32) for prompt in prompts]
        while len(conductor.finished) < len(sequences):
            which = chance.randrange(len(sequences))
            start = len(prompts[which]) + chance.randint(0, 34)
            offset = start - len(prompts[which])
            # Mostly the truth, spoilt at random places; at times sheer noise.
            tokens = (expected[which] + [1] * 8)[offset : offset + chance.randint(1, 8)] or [1]
            tokens = [t if chance.random() < 0.8 else chance.randrange(VOCAB_SIZE) for t in tokens]
            await conductor.send(drafts=drafts(sequences[which], start, tokens))
            await conductor.read_frame()
        assert [conductor.tokens[s] for s in sequences] == expected


async def test_sampled_text_depends_on_the_seed_alone(verifier: Process) -> None:
    sampling = sampling_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=7)
    other = sampling_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=8)
    async with Conductor(verifier.port) as conductor:
        alone = await conductor.open(PROMPT, 150, sampling=sampling)
        [text] = await conductor.finish(alone)
        await conductor.send(policy=SLOW_POLICY)
        pair = [await conductor.open(PROMPT, 150, sampling=s) for s in (sampling, other)]
        await conductor.send(drafts=long_drafts(pair[0], len(PROMPT), text))
        again, differs = await conductor.finish(*pair)
        assert again == text
        assert differs != text
        assert conductor.num_accepted > 0


async def test_chain_rejection_runs_and_accepts(verifier: Process, plain_text: Any) -> None:
    sampling = sampling_pb2.SamplingParams(temperature=0.01, seed=3, mode=sampling_pb2.VERIFY_MODE_REJECTION)
    text = plain_text(PROMPT, 190)
    async with Conductor(verifier.port) as conductor:
        await conductor.send(policy=SLOW_POLICY)
        # Long enough that the draft comes in while there is text left to draft.
        sequence = await conductor.open(PROMPT, 190, sampling=sampling)
        await conductor.send(drafts=long_drafts(sequence, len(PROMPT), text))
        [tokens] = await conductor.finish(sequence)
        assert len(tokens) == 190
        assert conductor.num_accepted > 0


async def test_stop_token_cuts_inside_an_accepted_block(verifier: Process, plain_text: Any) -> None:
    text = plain_text(PROMPT, 30)
    stop = next(token for place, token in enumerate(text) if place >= 5)
    end = text.index(stop) + 1
    async with Conductor(verifier.port) as conductor:
        await conductor.send(policy=SLOW_POLICY)
        sequence = await conductor.open(PROMPT, 30, stop_token_ids=[stop])
        await conductor.send(drafts=drafts(sequence, len(PROMPT), text[:20]))
        [tokens] = await conductor.finish(sequence)
        assert tokens == text[:end]
        assert conductor.finished[sequence] == sampling_pb2.FINISH_REASON_STOP


async def test_drafts_of_an_older_epoch_are_dropped_and_counted(verifier: Process, plain_text: Any) -> None:
    text = plain_text(PROMPT, 30)
    async with Conductor(verifier.port) as conductor:
        sequence = await conductor.open(PROMPT, 30, epoch=2)
        await conductor.send(drafts=drafts(sequence, len(PROMPT), text[:29], epoch=1))
        [tokens] = await conductor.finish(sequence)
        assert tokens == text
        assert conductor.num_accepted == 0
        assert sum(step.dropped.old_epoch for step in conductor.steps) == 29


async def test_malformed_drafts_are_counted_and_harmless(verifier: Process, plain_text: Any) -> None:
    async with Conductor(verifier.port) as conductor:
        sequence = await conductor.open(PROMPT, 30)
        bad_token = drafts(sequence, len(PROMPT), [VOCAB_SIZE, 1])
        bad_parent = drafts(sequence, len(PROMPT), [1, 2])
        bad_parent.parents[0] = 1
        short = drafts(sequence, len(PROMPT), [1, 2])
        del short.parents[1]
        for batch in (bad_token, bad_parent, short):
            await conductor.send(drafts=batch)
        [tokens] = await conductor.finish(sequence)
        assert tokens == plain_text(PROMPT, 30)
        assert sum(step.dropped.malformed for step in conductor.steps) == 6


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, "prompt_token_ids[0]"),
        ({"prompt_token_ids": [1] * MAX_POSITIONS}, "prompt_token_ids"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 10**9}, "max_new_tokens"),
        ({"sampling": sampling_pb2.SamplingParams(temperature=-1)}, "sampling.temperature"),
        ({"sampling": sampling_pb2.SamplingParams(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": sampling_pb2.SamplingParams(top_p=0.0)}, "sampling.top_p"),
        ({"sampling": sampling_pb2.SamplingParams(mode=77)}, "sampling.mode"),
        ({"max_draft_nodes": 10**6}, "max_draft_nodes"),
    ],
)
async def test_bad_opening_fails_alone_and_names_the_field(
    verifier: Process, plain_text: Any, fields: dict[str, Any], named: str
) -> None:
    async with Conductor(verifier.port) as conductor:
        running = await conductor.open(PROMPT, 24)
        opening = {"prompt_token_ids": PROMPT, "max_new_tokens": 4, **fields}
        assert await conductor.open(opening.pop("prompt_token_ids"), **opening) == 0
        [failure] = conductor.failures
        assert failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert failure.message.startswith(f"{named}:")
        assert (await conductor.finish(running))[0] == plain_text(PROMPT, 24)


async def test_a_sequence_without_a_slot_waits_and_past_the_queue_is_refused(
    verifier: Process, plain_text: Any
) -> None:
    async with Conductor(verifier.port) as conductor, Conductor(verifier.port) as other:
        for _ in range(8):
            assert await conductor.open(PROMPT, 190)
        waiting = await other.open(PROMPT, 4)
        assert await other.open(PROMPT, 4) == 0
        assert other.failures[-1].reason == "CAPACITY_EXHAUSTED"
        await other.read_until(lambda: len(other.steps) >= 3)
        assert not other.tokens[waiting]  # reports come all the same: silence would look like trouble
        first = next(iter(conductor.opened.values()))
        await conductor.send(closes=[first])
        assert await other.finish(waiting) == [plain_text(PROMPT, 4)]


@pytest.mark.parametrize("max_prefill_tokens", [1, 3, 64])
async def test_prompts_may_be_run_in_chunks_of_any_size(
    verifier: Process, plain_text: Any, max_prefill_tokens: int
) -> None:
    prompts = [[7 * place % VOCAB_SIZE for place in range(length)] for length in (2, 17, 40)]
    policy = peer_pb2.StepPolicy(version=1, max_prefill_tokens_per_step=max_prefill_tokens)
    async with Conductor(verifier.port) as conductor:
        await conductor.send(policy=policy)
        sequences = [await conductor.open(prompt, 12) for prompt in prompts]
        texts = await conductor.finish(*sequences)
        assert texts == [plain_text(prompt, 12) for prompt in prompts]


async def test_twelve_share_a_cache_that_holds_ten(
    target_dir: Path, plain_text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "services.verifier.kv_allocator.GROWTH_TOKENS", 8
    )  # as if they were told to write much more
    prompts = [[first, *PROMPT] for first in range(12)]
    labels = {"model_name": target_dir.name}
    before = metrics.REGISTRY.get_sample_value("vllm:num_preemptions_total", labels) or 0.0
    async with serving(target_dir, kv_limit_mib=1) as verifier, Conductor(verifier.port) as conductor:
        sequences = [await conductor.open(prompt, 190) for prompt in prompts]
        texts = await conductor.finish(*sequences)
        assert texts == [plain_text(prompt, 190) for prompt in prompts]
        assert not conductor.failures
        after = metrics.REGISTRY.get_sample_value("vllm:num_preemptions_total", labels)
        assert after is not None
        assert after > before


async def test_a_stream_that_ends_frees_its_sequences(verifier: Process) -> None:
    async with Conductor(verifier.port) as conductor:
        for _ in range(8):
            assert await conductor.open(PROMPT, 150)
    async with Conductor(verifier.port) as conductor:
        async with asyncio.timeout(10):
            while not await conductor.open(PROMPT, 2):
                pass


async def test_a_silent_conductor_loses_its_lease(verifier: Process) -> None:
    async with Conductor(verifier.port, lease_ms=1000) as conductor:
        code = await asyncio.wait_for(conductor.call.code(), 10)
        assert code == grpc.StatusCode.FAILED_PRECONDITION


async def test_another_protocol_version_is_refused(verifier: Process) -> None:
    conductor = Conductor(verifier.port)
    call = conductor.stub.Verify()
    await call.write(target_pb2.VerifyRequest(hello=peer_pb2.StreamHello(protocol_version=99, lease_ms=5000)))
    assert await call.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_resumed_tokens_count_and_are_not_repeated(verifier: Process, plain_text: Any) -> None:
    text = plain_text(PROMPT, 24)
    async with Conductor(verifier.port) as conductor:
        sequence = await conductor.open(PROMPT + text[:10], 24, num_resumed_tokens=10, epoch=1)
        [tokens] = await conductor.finish(sequence)
        assert tokens == text[10:]
