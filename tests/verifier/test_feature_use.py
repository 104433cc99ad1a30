"""Sequences whose drafter does without the target's features: nothing is captured, kept or sent for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.contract.errors import InvalidRequestError
from paceline.contract.policy import StepPolicy
from paceline.drafts import DraftEntry
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import drafter_tap, load_drafter
from paceline.methods.pard2.drafter import Pard2Drafter
from paceline.models import model_fingerprint
from paceline.sampling.params import SamplingParams
from paceline.target import SequenceRows, TargetEngine
from paceline.target.taps import Tap
from paceline.v1 import peer_pb2, target_pb2
from services.verifier import colocated
from services.verifier.colocated import ColocatedDrafter
from services.verifier.inbox import Open, SetPolicy
from services.verifier.specs import SequenceSpec, sequence_spec
from tests.methods.pard_checkpoint import save
from tests.simulation.verifier import ListedSession, SteppedVerifier
from tests.verifier.conductor import MAX_POSITIONS, VOCAB_SIZE, Conductor
from tests.verifier.conftest import serving

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def pard2_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter that reads the target's features, or does not."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.5,
    )
    model = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(config).save_pretrained(model)
    path = tmp_path_factory.mktemp("pard2")
    return save(path, model, "pard2", model_fingerprint(target_dir), target_hidden=32)


async def test_nothing_is_sent_of_a_sequence_that_nobody_reads(target_dir: Path, pard2_dir: Path) -> None:
    async with (
        serving(target_dir, tap_from=pard2_dir) as process,
        Conductor(process.port) as conductor,
    ):
        tap = conductor.info.tap
        assert tap.is_optional
        call = conductor.stub.StreamFeatures(target_pb2.StreamFeaturesRequest(subscriber_id="d", tap=tap))
        unread = await conductor.open(PROMPT, 30, reads_features=False)
        await conductor.send(attaches=[target_pb2.AttachFeatures(sequence_id=unread, subscriber_id="d")])
        await conductor.finish(unread)
        read = await conductor.open(PROMPT, 30, reads_features=True)
        await conductor.send(attaches=[target_pb2.AttachFeatures(sequence_id=read, subscriber_id="d")])
        assert (await call.read()).sequence_id == read
        assert len(set(map(tuple, await conductor.finish(unread, read)))) == 1
        call.cancel()


@pytest.mark.parametrize("reads_features", [None, True, False])
async def test_a_drafter_beside_the_target_drafts_as_asked(
    target_dir: Path,
    pard2_dir: Path,
    plain_text: Any,
    reads_features: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured: list[bool] = []
    drafted: list[bool] = []
    step, draft = TargetEngine.step, Pard2Drafter.draft

    def stepping(engine: TargetEngine, batch: Sequence[SequenceRows], **options: Any) -> Any:
        if engine.taps:
            captured.extend(rows.wants_features for rows in batch)
        return step(engine, batch, **options)

    def drafting(drafter: Pard2Drafter, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        entries = draft(drafter, requests)
        drafted.extend(r.reads_features for r, e in zip(requests, entries, strict=True) if e is not None)
        return entries

    async with (
        serving(target_dir, drafter=pard2_dir, profile_s=0.0) as process,
        Conductor(process.port) as conductor,
    ):
        monkeypatch.setattr(TargetEngine, "step", stepping)
        monkeypatch.setattr(Pard2Drafter, "draft", drafting)
        policy = peer_pb2.StepPolicy(
            version=1, max_nodes_per_step=64, max_nodes_per_sequence=8, draft_length=4
        )
        await conductor.send(policy=policy)
        numbers = []
        for _ in range(2):  # the second time the prompt's rows, and their features, are another sequence's
            sequence = await conductor.open(PROMPT, 20, reads_features=reads_features)
            [tokens] = await conductor.finish(sequence)
            assert tokens == plain_text(PROMPT, 20)
            numbers.append(len(drafted))
    wanted = reads_features is not False
    assert set(captured) == set(drafted) == {wanted}
    assert numbers[1] == 2 * numbers[0] > 20


@pytest.mark.parametrize("num_off", [3, 12])
def test_features_of_text_written_while_drafting_is_off_are_made_when_it_is_on(
    target_dir: Path, pard2_dir: Path, num_off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are those of a drafter that was fed all the time, and none is projected that nobody reads."""
    monkeypatch.setattr(colocated, "MAX_CAPTURED_ROWS", 24)  # the prompt and four more
    projected: list[int] = []
    project = Tap.project

    def projecting(tap: Tap, captured: torch.Tensor) -> torch.Tensor:
        projected.append(len(captured))
        return project(tap, captured)

    monkeypatch.setattr(Tap, "project", projecting)
    on = StepPolicy(max_nodes_per_sequence=8, draft_length=4)
    off = StepPolicy(max_nodes_per_sequence=0, draft_length=0)
    drafts = []
    for first in (on, off):
        engine = TargetEngine.load(target_dir, dtype=torch.float32)
        drafter = load_drafter(pard2_dir, target_dir)
        assert drafter.tap is not None
        engine.add_tap(drafter.tap)
        verifier = SteppedVerifier(engine, drafter=ColocatedDrafter(drafter, engine), prefix_cache_bytes=0)
        spec = SequenceSpec(1, 0, tuple(PROMPT), SamplingParams(temperature=0.0), 60, frozenset(), 8)
        verifier.put(SetPolicy(first), Open(ListedSession(), spec, None))
        verifier.step()
        [sequence] = verifier.table.running
        projected.clear()
        if first is off:
            verifier.step(num_off)
            assert projected == ([24] if num_off > 3 else [])
            verifier.put(SetPolicy(on))
            verifier.step()
        while sequence.committed_length < len(PROMPT) + 20:
            verifier.step()
        drafts.append((sequence.committed_length, tuple(sequence.committed), sequence.trie.select_best(8, 8)))
    lengths = {length for length, _, _ in drafts}
    assert len(lengths) == 1
    assert drafts[0] == drafts[1]
    assert len(drafts[0][2]) > 0


@pytest.mark.parametrize(
    ("method", "tap", "reads_features", "message"),
    [
        ("eagle3", {"width": 8}, False, "eagle3 cannot draft without features"),
        ("independent", {}, True, "independent reads no features"),
    ],
)
def test_what_its_own_drafter_cannot_do_is_refused_by_name(
    method: str, tap: dict[str, Any], reads_features: bool, message: str
) -> None:
    info = peer_pb2.PeerInfo(vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS, method=method, tap=tap)
    opening = target_pb2.OpenSequence(
        key=1, prompt_token_ids=PROMPT, max_new_tokens=4, reads_features=reads_features
    )
    with pytest.raises(InvalidRequestError, match=f"reads_features.*{message}"):
        sequence_spec(opening, info)
    opening.reads_features = not reads_features
    assert sequence_spec(opening, info).reads_features is not reads_features
    opening.ClearField("reads_features")
    assert sequence_spec(opening, info).reads_features


def test_a_checkpoint_says_that_its_features_are_optional(pard2_dir: Path) -> None:
    tap = drafter_tap(pard2_dir)
    assert tap is not None
    assert tap.is_optional
