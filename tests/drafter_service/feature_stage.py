"""A drafter that reads features, and a verifier that sends them when a test says so."""

from __future__ import annotations

from typing import Any

from paceline.target import TapSpec
from paceline.v1 import drafter_pb2, peer_pb2
from tests.drafter_service.conftest import Bench, Conductor, drafter_info, opening
from tests.drafter_service.scripted import ScriptedDrafter, ScriptedFeatures

PROMPT = [5, 6, 7, 8]


TAP = TapSpec(layers=(1, 2))


LAST = TapSpec(norm_final=True, last_only=True)


class Stage:
    """A drafter that reads features, and a verifier that sends them when a test says so."""

    def __init__(self, drafter: ScriptedDrafter, verifier: ScriptedFeatures, conductor: Conductor) -> None:
        self.drafter = drafter
        self.verifier = verifier
        self.conductor = conductor

    def opening(self, sequence_id: int, tokens: list[int], **fields: Any) -> drafter_pb2.OpenDraftSequence:
        return opening(
            sequence_id,
            tokens,
            **({"verifier_endpoint": self.verifier.endpoint, "verifier_instance_id": "verifier-1"} | fields),
        )


async def stage(
    bench: Bench, verifier_info: dict[str, Any] | None = None, tap: TapSpec = TAP, **settings: Any
) -> Stage:
    drafter = ScriptedDrafter(tap=tap)
    info = drafter_info(drafter)
    fields = {"instance_id": "verifier-1", "model_fingerprint": info.model_fingerprint, "tap": info.tap}
    verifier = ScriptedFeatures(peer_pb2.PeerInfo(**(fields | (verifier_info or {}))))
    await verifier.start()
    bench.stack.push_async_callback(verifier.stop)
    conductor = await bench.serve(drafter, info, **settings)
    await conductor.send(policy=peer_pb2.StepPolicy(draft_length=2))
    await conductor.read()
    return Stage(drafter, verifier, conductor)


async def assert_the_first_is_lost_and_the_second_drafted(on: Stage) -> None:
    failures: list[peer_pb2.SequenceFailure] = []
    drafted: list[int] = []
    while not (failures and drafted):
        answer = await on.conductor.read()
        failures.extend(answer.failures)
        drafted.extend(answer.drafts.sequence_ids)
    assert [(f.sequence_id, f.reason) for f in failures] == [(1, "FEATURES_LOST")]
    assert drafted == [2]


async def assert_silence(on: Stage, frame_id: int) -> None:
    """The frame has an empty answer, and so have the next ones, without the drafter being asked."""
    answer = await on.conductor.read()
    assert (answer.frame_id, list(answer.drafts.sequence_ids)) == (frame_id, [])
    for _ in range(3):  # turns of the loop, each of which would ask again
        frame_id = await on.conductor.send()
        assert (await on.conductor.read()).frame_id == frame_id
    assert len(on.drafter.batches) == 1
