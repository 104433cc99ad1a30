"""A drafter of the target's keys and values, beside the target and away from it: same text, same drafts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.methods.drafter import DraftRequest
from paceline.methods.gemma4_mtp.model import FULL
from paceline.methods.loading import load_drafter
from paceline.target import SequenceRows, StepError, TargetEngine
from paceline.v1 import peer_pb2, target_pb2
from services.runtime import feature_parts, tensors
from services.runtime.metrics import PREFIX_CACHE_HITS
from services.verifier.host import VerifierHost
from services.verifier.settings import VerifierSettings
from tests.methods.gemma4_checkpoint import FOR_LLAMA, save_assistant
from tests.verifier.conductor import MAX_POSITIONS, VOCAB_SIZE, Conductor
from tests.verifier.conftest import serving

PROMPT, NUM_TOKENS = list(range(5, 30)), 24
SHAPE = {
    **FOR_LLAMA, "backbone": 32, "vocab": VOCAB_SIZE, "head_dims": {FULL: 8}, "max_positions": MAX_POSITIONS
}  # fmt: skip


@pytest.fixture(scope="module")
def drafter_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_assistant(tmp_path_factory.mktemp("drafter"), target_dir, SHAPE)


@pytest.mark.parametrize("prefix_mib", [0, 1])
async def test_beside_the_target_its_cache_is_read_in_place(
    target_dir: Path, drafter_dir: Path, plain_text: Any, prefix_mib: int
) -> None:
    """Twice: the second time the prompt's rows are another sequence's."""
    expected = plain_text(PROMPT, NUM_TOKENS)
    async with (
        serving(target_dir, drafter=drafter_dir, prefix_cache_mib=prefix_mib) as process,
        Conductor(process.port) as conductor,
    ):
        assert conductor.info.tap.last_only  # keys and values stay where they are
        assert not conductor.info.tap.cached_layers
        policy = peer_pb2.StepPolicy(
            version=1, max_nodes_per_step=64, max_nodes_per_sequence=8, draft_length=4
        )
        await conductor.send(policy=policy)
        for _ in range(2):
            before = len(conductor.steps)
            num_shared = num_prefix_hits()
            sequence_id = await conductor.open(PROMPT, NUM_TOKENS)
            await conductor.read_until(lambda i=sequence_id: i in conductor.finished)  # type: ignore[misc]
            assert conductor.tokens[sequence_id] == expected
            steps = conductor.steps[before:]
            num_drafted = sum(sum(step.num_draft_tokens) for step in steps)
            # Steps verified drafts; how many nodes of each pays is measured, and depends on what else the machine does.
            assert num_drafted >= len(steps)
        assert num_prefix_hits() - num_shared == (len(PROMPT) - 1 if prefix_mib else 0)  # the second time


def num_prefix_hits() -> float:
    """Prompt tokens that were found in a prefix cache of this process."""
    return sum(s.value for m in PREFIX_CACHE_HITS.collect() for s in m.samples if s.name.endswith("_total"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_layers": {FULL: 4}}, "cached layer 4 is outside 0..3"),
        ({"kv_heads": {FULL: 4}}, "2 key heads of width 8, the tap expects 4 of 8"),
        ({"head_dims": {FULL: 16}}, "2 key heads of width 8, the tap expects 2 of 16"),
    ],
)
def test_a_cache_without_what_is_read_is_refused(
    target_dir: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    drafter = save_assistant(tmp_path, target_dir, SHAPE | changes)
    settings = VerifierSettings(
        model=str(target_dir), drafter=drafter, dtype="float32", port=0, metrics_port=None
    )
    with pytest.raises(StepError, match=words):
        VerifierHost.load(settings, num_threads=1)


async def test_away_from_it_features_make_the_same_drafts(target_dir: Path, drafter_dir: Path) -> None:
    """The prompt is run in chunks of four; the reader comes late, and a second time."""
    drafter, alone = (load_drafter(drafter_dir, target_dir, dtype=torch.float32) for _ in range(2))
    assert drafter.tap is not None
    async with (
        serving(target_dir, tap_from=drafter_dir, step_curve="10") as process,
        Conductor(process.port) as conductor,
    ):
        parts = feature_parts.tap_parts(conductor.info.tap)
        policy = peer_pb2.StepPolicy(
            version=1, max_nodes_per_step=64, max_nodes_per_sequence=8, max_prefill_tokens_per_step=4
        )
        await conductor.send(policy=policy)
        sequence_id = await conductor.open(PROMPT, 150)
        await conductor.send(attaches=[target_pb2.AttachFeatures(sequence_id=sequence_id, subscriber_id="d")])
        request = target_pb2.StreamFeaturesRequest(subscriber_id="d", tap=conductor.info.tap)
        engine = TargetEngine.load(target_dir, dtype=torch.float32, taps=[drafter.tap])
        for number in range(2):
            call, received = conductor.stub.StreamFeatures(request), []
            while len(received) < 3:
                chunk = await asyncio.wait_for(call.read(), 20)
                recent = [tensors.decode(part, 1 << 20, 2) if part.data else None for part in chunk.recent]
                rows = feature_parts.join(tensors.decode(chunk.features, 1 << 20, 2), recent, parts)
                received.append((chunk.start, rows))
            call.cancel()
            assert received[0][0] == 0
            end = received[-1][0] + len(received[-1][1])
            wanted = end + 1 - len(PROMPT)
            await conductor.read_until(lambda count=wanted: len(conductor.tokens[sequence_id]) >= count)  # type: ignore[misc]
            text = [*PROMPT, *conductor.tokens[sequence_id][:wanted]]
            (whole,) = engine.step([SequenceRows(engine.open(), text, num_logits="none")]).features
            alone.open(number, text)
            alone.feed(number, 0, whole[:-1])
            drafter.open(number, text)
            for start, rows in received:
                drafter.feed(number, start, rows)
            (one,), (other,) = (each.draft([DraftRequest(number, 4)]) for each in (alone, drafter))
            assert one is not None
            assert other is not None
            assert one.tokens == other.tokens
        await conductor.send(closes=[sequence_id])
