"""Where drafting happens, and which drafter takes a sequence."""

from __future__ import annotations

import pytest

from orchestrator.placement import DrafterRequirement, check_drafter, choose_drafter, placement_in_force
from paceline.contract.errors import (
    IncompatiblePeerError,
)
from paceline.v1 import peer_pb2
from tests.orchestrator.scripted_peers import peer_info


def test_placement_in_force() -> None:
    with_method, without = peer_info("verifier", method="eagle3"), peer_info("verifier")
    assert placement_in_force("auto", ["d:1"], with_method) == "separate"
    assert placement_in_force("auto", [], with_method) == "colocated"
    assert placement_in_force("auto", [], without) == "none"
    assert placement_in_force("auto", [], None) == "none"
    assert placement_in_force("none", ["d:1"], with_method) == "none"


class Drafter:
    def __init__(self, name: str, is_up: bool, is_stalled: bool, num_sequences: int) -> None:
        self.is_up, self.is_stalled, self.num_sequences = is_up, is_stalled, num_sequences
        self.endpoint = f"{name}:1"
        self.info: peer_pb2.PeerInfo | None = peer_info("drafter", drafter_name=name, method="eagle3")


def test_drafter_with_fewest_sequences_is_chosen_and_stalled_ones_last() -> None:
    down = Drafter("down", False, False, 0)
    stalled = Drafter("stalled", True, True, 0)
    busy = Drafter("busy", True, False, 5)
    idle = Drafter("idle", True, False, 2)
    assert choose_drafter([down, stalled, busy, idle]) is idle
    assert choose_drafter([down, stalled]) is stalled
    assert choose_drafter([down]) is None


@pytest.mark.parametrize("name", ["busy", "busy:1"])
def test_a_drafter_is_found_by_its_name_or_endpoint(name: str) -> None:
    busy, idle = Drafter("busy", True, False, 5), Drafter("idle", True, False, 2)
    assert choose_drafter([busy, idle], DrafterRequirement(name)) is busy
    assert choose_drafter([busy, idle], DrafterRequirement("eagle3")) is idle
    assert choose_drafter([busy, idle], DrafterRequirement("nobody")) is None
    busy.info = None
    assert (choose_drafter([busy, idle], DrafterRequirement(name)) is busy) == (name == "busy:1")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"protocol_version": 99}, "protocol version 99"),
        ({"model_fingerprint": "other"}, "model_fingerprint"),
        ({"tokenizer_fingerprint": "other"}, "tokenizer_fingerprint"),
        ({"vocab_size": 5}, "vocab_size"),
        ({"tap": peer_pb2.FeatureTap(layers=[1], width=8)}, "features"),
    ],
)
def test_incompatible_drafter_is_refused_naming_what_differs(changes: dict[str, object], match: str) -> None:
    with pytest.raises(IncompatiblePeerError, match=match):
        check_drafter(peer_info("drafter", **changes), peer_info("verifier"))


def test_drafter_without_features_suits_a_verifier_with_a_tap() -> None:
    check_drafter(peer_info("drafter"), peer_info("verifier", tap=peer_pb2.FeatureTap(layers=[1], width=8)))
