"""Requests that say whether their drafter reads the target's features, from the conductor to scripted peers."""

from __future__ import annotations

import grpc
import pytest

from orchestrator.placement import DrafterRequirement, choose_drafter
from paceline.v1 import peer_pb2, sampling_pb2
from tests.orchestrator.conftest import Bench, run_request
from tests.orchestrator.scripted_drafter import ScriptedDrafter
from tests.orchestrator.scripted_peers import continuation, peer_info
from tests.orchestrator.scripted_verifier import ScriptedVerifier
from tests.orchestrator.test_placement import Drafter

PROMPT = [5, 6, 7]
NEEDED = peer_pb2.FeatureTap(layers=[1, 2], width=8, projection_fingerprint="p")
OPTIONAL = peer_pb2.FeatureTap(layers=[1, 2], width=8, projection_fingerprint="p", is_optional=True)
NONE = peer_pb2.FeatureTap()


def asking(reads_features: bool, drafter: str = "") -> sampling_pb2.SpeculationOptions:
    return sampling_pb2.SpeculationOptions(reads_features=reads_features, drafter=drafter)


@pytest.mark.parametrize("reads_features", [True, False])
async def test_features_travel_for_the_requests_that_want_them(bench: Bench, reads_features: bool) -> None:
    verifier, drafter = ScriptedVerifier(tap=OPTIONAL), ScriptedDrafter(tap=OPTIONAL)
    await bench.start(verifier, drafter)
    outcome = await bench.run(run_request(PROMPT, 30, speculation=asking(reads_features)))
    assert outcome.tokens == continuation(PROMPT, 30)
    [opened], [begun] = drafter.opens, verifier.opens
    assert (opened.HasField("reads_features"), opened.reads_features) == (True, reads_features)
    assert (begun.HasField("reads_features"), begun.reads_features) == (True, reads_features)
    assert bool(opened.verifier_endpoint) is reads_features
    assert len(verifier.attaches) == reads_features


async def test_a_request_that_says_nothing_leaves_it_to_the_drafter(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(tap=OPTIONAL), ScriptedDrafter(tap=OPTIONAL)
    await bench.start(verifier, drafter)
    await bench.run(run_request(PROMPT, 30))
    assert not drafter.opens[0].HasField("reads_features")
    assert not verifier.opens[0].HasField("reads_features")
    assert drafter.opens[0].verifier_endpoint
    assert len(verifier.attaches) == 1


@pytest.mark.parametrize(
    ("tap", "reads_features", "message"),
    [
        (NEEDED, False, "no drafter drafts without the target's features"),
        (NONE, True, "no drafter reads the target's features"),
    ],
)
async def test_what_no_drafter_can_do_is_refused_by_name(
    bench: Bench, tap: peer_pb2.FeatureTap, reads_features: bool, message: str
) -> None:
    verifier, drafter = ScriptedVerifier(tap=tap), ScriptedDrafter(tap=tap)
    await bench.start(verifier, drafter)
    with pytest.raises(grpc.aio.AioRpcError, match=rf"speculation\.reads_features.*{message}") as refused:
        await bench.run(run_request(PROMPT, 30, speculation=asking(reads_features)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not verifier.opens
    outcome = await bench.run(run_request(PROMPT, 30, speculation=asking(not reads_features)))
    assert outcome.tokens == continuation(PROMPT, 30)


async def test_a_named_drafter_must_be_able_to(bench: Bench) -> None:
    verifier = ScriptedVerifier(tap=NEEDED)
    reader = ScriptedDrafter(tap=NEEDED, drafter_name="reader")
    plain = ScriptedDrafter(drafter_name="plain")
    await bench.start(verifier, reader, plain)
    with pytest.raises(grpc.aio.AioRpcError, match="no drafter called 'reader' drafts without"):
        await bench.run(run_request(PROMPT, 30, speculation=asking(False, "reader")))
    for _ in range(3):  # and an unnamed one is the one that can
        await bench.run(run_request(PROMPT, 30, speculation=asking(False)))
    assert len(plain.opens) == 3
    assert not reader.opens


@pytest.mark.parametrize("tap", [NEEDED, OPTIONAL])
async def test_the_verifiers_own_drafter_is_asked_too(bench: Bench, tap: peer_pb2.FeatureTap) -> None:
    verifier = ScriptedVerifier(tap=tap, method="scripted")
    await bench.start(verifier)
    request = run_request(PROMPT, 30, speculation=asking(False))
    if tap is NEEDED:
        with pytest.raises(grpc.aio.AioRpcError, match=r"speculation\.reads_features"):
            await bench.run(request)
        return
    assert (await bench.run(request)).tokens == continuation(PROMPT, 30)
    assert verifier.opens[0].HasField("reads_features")


async def test_an_unused_drafter_beside_the_target_gets_no_requirement(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(tap=NEEDED, method="scripted"), ScriptedDrafter()
    await bench.start(verifier, drafter)
    outcome = await bench.run(run_request(PROMPT, 30, speculation=asking(False)))
    assert outcome.tokens == continuation(PROMPT, 30)
    assert not verifier.opens[0].HasField("reads_features")
    assert not drafter.opens[0].reads_features


def test_who_can_do_as_asked() -> None:
    drafters = {
        name: Drafter(name, True, False, load)
        for load, (name, tap) in enumerate({"needs": NEEDED, "may": OPTIONAL, "reads none": NONE}.items())
    }
    for (name, drafter), tap in zip(drafters.items(), (NEEDED, OPTIONAL, NONE), strict=True):
        drafter.info = peer_info("drafter", drafter_name=name, tap=tap)
    able = {
        reads: [name for name, d in drafters.items() if DrafterRequirement(reads_features=reads).is_met_by(d)]
        for reads in (None, True, False)
    }
    assert able == {None: [*drafters], True: ["needs", "may"], False: ["may", "reads none"]}
    assert choose_drafter(drafters.values(), DrafterRequirement(reads_features=False)) is drafters["may"]
    assert choose_drafter(drafters.values(), DrafterRequirement("needs", False)) is None
