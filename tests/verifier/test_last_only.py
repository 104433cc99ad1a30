"""Features of a tap that reads the newest position alone: the bytes of a round, late readers, co-located drafts."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.methods.medusa_heads.target_side import TAP
from paceline.target import SequenceRows, TargetEngine
from paceline.v1 import peer_pb2, target_pb2
from services.runtime import tensors
from tests.memorised import memorise
from tests.verifier.conductor import Conductor
from tests.verifier.conftest import serving

PROMPT = list(range(5, 45))  # long enough to be shared as a prefix
NUM_TOKENS = 17
HIDDEN = 32


@pytest.fixture(scope="module")
def known_text(plain_text: Any) -> list[int]:
    return [*PROMPT, *plain_text(PROMPT, NUM_TOKENS)]


@pytest.fixture(scope="module")
def medusa_dir(target_dir: Path, known_text: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return memorise(tmp_path_factory.mktemp("medusa1"), target_dir, [known_text], [len(PROMPT)])


class Reader:
    """Reads a StreamFeatures call to its end."""

    def __init__(self, conductor: Conductor, subscriber_id: str) -> None:
        request = target_pb2.StreamFeaturesRequest(subscriber_id=subscriber_id, tap=conductor.info.tap)
        self._call = conductor.stub.StreamFeatures(request)
        self.chunks: list[target_pb2.StreamFeaturesResponse] = []

    async def read(self) -> target_pb2.StreamFeaturesResponse:
        self.chunks.append(await asyncio.wait_for(self._call.read(), 20))
        return self.chunks[-1]

    def close(self) -> None:
        self._call.cancel()


def draft(sequence_id: int, start: int, tokens: list[int]) -> peer_pb2.DraftBatch:
    """A chain."""
    return peer_pb2.DraftBatch(
        sequence_ids=[sequence_id],
        epochs=[0],
        starts=[start],
        sizes=[len(tokens)],
        tokens=tokens,
        parents=list(range(-1, len(tokens) - 1)),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_round_costs_one_row_however_much_it_commits(
    dtype: str, target_dir: Path, medusa_dir: Path, known_text: list[int]
) -> None:
    """2 x hidden bytes a round in bfloat16; nothing for the prompt, which is run in chunks of four."""
    async with (
        serving(target_dir, tap_from=medusa_dir, dtype=dtype) as process,
        Conductor(process.port) as conductor,
    ):
        assert conductor.info.tap.last_only
        assert conductor.info.tap.final_norm
        policy = peer_pb2.StepPolicy(
            version=1, max_nodes_per_step=64, max_nodes_per_sequence=8, max_prefill_tokens_per_step=4
        )
        await conductor.send(policy=policy)
        reader = Reader(conductor, "d")
        sequence_id = await conductor.open(PROMPT, NUM_TOKENS)
        attach = target_pb2.AttachFeatures(sequence_id=sequence_id, subscriber_id="d")
        await conductor.send(attaches=[attach])
        await conductor.send(drafts=draft(sequence_id, len(PROMPT) + 1, known_text[len(PROMPT) + 1 :]))
        await conductor.read_until(lambda: sequence_id in conductor.finished)
        text = [*PROMPT, *conductor.tokens[sequence_id]]
        rounds = [step for step in conductor.steps if step.commits.sequence_ids]
        if dtype == "float32":
            assert text == known_text
            assert conductor.num_accepted > 0
        going_on = len(rounds) - 1  # the last round ends the sequence, and nobody goes on from it
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.3):
                    await reader.read()
        reader.close()
    itemsize = 4 if dtype == "float32" else 2
    sizes = [len(chunk.features.data) for chunk in reader.chunks]
    # The subscription may have come in after the first rounds; then the newest of them is replayed.
    assert 0 < len(sizes) <= going_on
    assert sizes == [itemsize * HIDDEN] * len(sizes)
    ends = []
    for step in rounds:
        ends.append(step.commits.starts[0] + step.commits.sizes[0] - 2)
    assert [chunk.start for chunk in reader.chunks] == ends[going_on - len(sizes) : going_on]
    if dtype == "float32":  # and it is the row that the LM head reads
        engine = TargetEngine.load(target_dir, dtype=torch.float32, taps=[TAP])
        rows = engine.step([SequenceRows(engine.open(), text, num_logits="none")]).features[0]
        for chunk in reader.chunks:
            assert torch.allclose(
                tensors.decode(chunk.features, 1 << 20)[0], rows[chunk.start], atol=1e-5, rtol=1e-4
            )


async def test_a_reader_that_comes_back_gets_the_newest_row_and_no_other(
    target_dir: Path, medusa_dir: Path, known_text: list[int]
) -> None:
    async with (
        serving(target_dir, tap_from=medusa_dir, step_curve="10") as process,
        Conductor(process.port) as conductor,
    ):
        sequence_id = await conductor.open(PROMPT, 150)
        await conductor.read_until(lambda: len(conductor.tokens[sequence_id]) > 20)
        await conductor.send(attaches=[target_pb2.AttachFeatures(sequence_id=sequence_id, subscriber_id="d")])
        for _ in range(2):  # again after it was lost
            reader = Reader(conductor, "d")
            first, second = await reader.read(), await reader.read()
            reader.close()
            assert first.start >= len(PROMPT) + 19
            assert list(first.features.shape) == list(second.features.shape) == [1, HIDDEN]
            assert (len(first.tokens), len(second.tokens)) == (
                0,
                1,
            )  # what is replayed was committed long ago
            assert second.start == first.start + 1
        await conductor.send(closes=[sequence_id])


@pytest.mark.parametrize("prefix_mib", [0, 1])
async def test_a_colocated_drafter_is_right_and_changes_nothing(
    target_dir: Path, medusa_dir: Path, known_text: list[int], prefix_mib: int
) -> None:
    """Twice: the second time the prompt's rows are another sequence's, and their features are not wanted."""
    async with (
        serving(target_dir, drafter=medusa_dir, prefix_cache_mib=prefix_mib) as process,
        Conductor(process.port) as conductor,
    ):
        policy = peer_pb2.StepPolicy(
            version=1, max_nodes_per_step=64, max_nodes_per_sequence=8, draft_length=4
        )
        await conductor.send(policy=policy)
        for _ in range(2):
            before = len(conductor.steps)
            sequence_id = await conductor.open(PROMPT, NUM_TOKENS)
            await conductor.read_until(lambda i=sequence_id: i in conductor.finished)  # type: ignore[misc]
            assert [*PROMPT, *conductor.tokens[sequence_id]] == known_text
            # Seventeen tokens, up to five a step once the heads have begun; how many are worth it is measured.
            assert len(conductor.steps) - before < 2 * NUM_TOKENS // 3
