"""What the gateway believes is served, and when it stops believing it."""

from __future__ import annotations

import pytest

from paceline.contract.errors import IncompatiblePeerError, PacelineError, UnavailableError
from paceline.v1 import orchestrator_pb2, peer_pb2
from services.gateway.served_model import ModelWatch, ServedModel


def deployment(**fields) -> orchestrator_pb2.DescribeDeploymentResponse:
    values = {"vocab_size": 300, "max_positions": 64, "model_name": "tiny", "tokenizer_fingerprint": "t1"}
    return orchestrator_pb2.DescribeDeploymentResponse(verifier=peer_pb2.PeerInfo(**{**values, **fields}))


class Answers:
    """A director that answers in turn; errors are raised."""

    def __init__(self, *answers: orchestrator_pb2.DescribeDeploymentResponse | PacelineError) -> None:
        self._answers = list(answers)

    async def __call__(self) -> orchestrator_pb2.DescribeDeploymentResponse:
        answer = self._answers.pop(0)
        if isinstance(answer, PacelineError):
            raise answer
        return answer


async def test_unknown_until_the_director_answers() -> None:
    watch = ModelWatch(Answers(UnavailableError("down"), deployment()), 1.0)
    with pytest.raises(UnavailableError, match="not been reached"):
        watch.current()
    await watch.refresh()
    with pytest.raises(UnavailableError, match="down"):
        watch.current()
    assert not watch.known.is_set()
    await watch.refresh()
    assert watch.current() == ServedModel("tiny", "", 300, 64, (), "", "none")
    assert watch.known.is_set()


async def test_the_last_known_model_outlives_a_silent_director() -> None:
    watch = ModelWatch(Answers(deployment(), UnavailableError("down")), 1.0)
    await watch.refresh()
    await watch.refresh()
    assert watch.current().name == "tiny"


async def test_another_tokenizer_is_refused() -> None:
    watch = ModelWatch(Answers(deployment(), deployment(tokenizer_fingerprint="t2")), 1.0, None, "t1")
    await watch.refresh()
    assert watch.current().vocab_size == 300
    await watch.refresh()
    with pytest.raises(IncompatiblePeerError, match="tokenizer"):
        watch.current()


@pytest.mark.parametrize("missing", [{"vocab_size": 0}, {"max_positions": 0}])
def test_a_director_without_a_verifier_is_not_believed(missing: dict[str, int]) -> None:
    with pytest.raises(UnavailableError):
        ServedModel.from_deployment(deployment(**missing), None, "")


def test_method_and_name() -> None:
    described = deployment(method="eagle3")
    described.placement = "colocated"
    model = ServedModel.from_deployment(described, "served", "t1")
    assert (model.name, model.method, model.placement) == ("served", "eagle3", "colocated")
