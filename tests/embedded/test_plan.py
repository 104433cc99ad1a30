"""Which cores, ports and flags the processes of one machine get."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from paceline.contract.errors import InvalidRequestError
from paceline.embedded import DeploymentOptions, Placement, Ports
from paceline.embedded.commands import server_flags
from paceline.embedded.cores import parse_cores, plan_cores, thread_environment
from paceline.embedded.failure import DeploymentError
from paceline.embedded.ports import ROLES, is_free

HERE = Path("model")


def options(placement: Placement = Placement.SEPARATE, **fields) -> DeploymentOptions:
    return DeploymentOptions(model=HERE, drafter=Path("drafter"), placement=placement, **fields)


def test_a_separate_drafter_gets_the_last_core_and_the_target_the_others() -> None:
    plan = plan_cores(options(), range(4))
    assert (plan.verifier, plan.verifier_threads) == ((0, 1, 2), 3)
    assert (plan.drafter, plan.drafter_threads) == ((3,), 1)
    assert plan.control == (3,)
    assert not plan.is_shared


def test_two_cores_are_one_each() -> None:
    plan = plan_cores(options(), [4, 9])
    assert (plan.verifier, plan.drafter, plan.verifier_threads, plan.drafter_threads) == ((4,), (9,), 1, 1)
    assert "verifier: cores 4, 1 torch thread" in plan.describe()


def test_one_core_is_shared_and_said_so() -> None:
    plan = plan_cores(options(), [0])
    assert plan.is_shared
    assert plan.verifier == plan.drafter == (0,)
    assert any("take turns" in line for line in plan.describe())


@pytest.mark.parametrize("placement", [Placement.PLAIN, Placement.COLOCATED])
def test_without_a_drafter_process_the_target_leaves_the_last_core_to_the_others(
    placement: Placement,
) -> None:
    plan = plan_cores(options(placement), range(4))
    assert (plan.verifier, plan.verifier_threads, plan.drafter, plan.control) == ((0, 1, 2), 3, (), (3,))
    alone = plan_cores(options(placement), [5])
    assert (alone.verifier, alone.verifier_threads, alone.control, alone.is_shared) == ((5,), 1, (5,), False)


def test_fixed_parts_are_kept() -> None:
    plan = plan_cores(options(verifier_cores=(3,), drafter_cores=(0, 1), drafter_threads=1), range(4))
    assert (plan.verifier, plan.drafter, plan.drafter_threads, plan.control) == ((3,), (0, 1), 1, (0, 1, 2))
    plain = plan_cores(options(Placement.PLAIN, verifier_cores=(0,)), range(2))
    assert (plain.verifier, plain.verifier_threads, plain.control) == ((0,), 1, (1,))
    every = plan_cores(options(Placement.PLAIN, verifier_cores=(0, 1)), range(2))
    assert (every.verifier, every.verifier_threads, every.control) == ((0, 1), 2, ())
    ruled = plan_cores(options(Placement.COLOCATED, control_cores=(0, 1)), range(4))
    assert (ruled.verifier, ruled.control) == ((2, 3), (0, 1))


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="drafter_cores"):
        plan_cores(options(drafter_cores=(7,)), range(2))


@pytest.mark.parametrize(("text", "cores"), [("0", (0,)), ("0-3,6", (0, 1, 2, 3, 6)), (" 2 , 1", (1, 2))])
def test_core_lists(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,", "999999"])
def test_bad_core_lists(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_cores(text)


def test_waiting_threads_spin_for_a_moment_only() -> None:
    environment = thread_environment(2)
    assert environment["OMP_NUM_THREADS"] == "2"
    assert 0 < int(environment["GOMP_SPINCOUNT"]) <= 10_000
    assert "OMP_WAIT_POLICY" not in environment
    assert thread_environment(1)["GOMP_SPINCOUNT"] == "0"


def test_speculation_needs_a_drafter() -> None:
    with pytest.raises(InvalidRequestError, match="drafter"):
        DeploymentOptions(model=HERE, placement=Placement.SEPARATE)
    assert "drafter" not in DeploymentOptions(model=HERE, placement=Placement.PLAIN).roles


def test_ports() -> None:
    ports = Ports.default()
    assert [ports.grpc[role] for role in ROLES] == [50050, 50051, 50052, 50053, 50054]
    assert [ports.metrics[role] for role in ROLES] == [9100, 9101, 9102, 9103, 9104]
    free = Ports.free()
    numbers = [*free.grpc.values(), *free.metrics.values()]
    assert len(set(numbers)) == len(numbers)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free.grpc["verifier"]))
        holder.listen()
        assert not is_free(free.grpc["verifier"])
        assert free.taken() == [("verifier", free.grpc["verifier"])]


def flags(role: str, placement: Placement, **fields) -> str:
    given = options(placement, **fields)
    plan = plan_cores(given, range(4))
    return " ".join(server_flags(role, given, plan, Ports.default(), "redis://r", Path("ready")))


def test_flags_of_each_role() -> None:
    verifier = flags("verifier", Placement.SEPARATE, dtype="float32")
    assert "--port 50051 --metrics-port 9101 --ready-file ready" in verifier
    assert "--threads 3 --cores 0,1,2 --tap-from drafter" in verifier
    assert "--dtype float32" in verifier
    assert "--ngram-tokens" not in verifier  # its own default
    assert "--ngram-tokens 0" in flags("verifier", Placement.COLOCATED, ngram_tokens=0)
    assert "--ngram-tokens 0" in flags("verifier", Placement.PLAIN)
    assert "--drafter drafter" in flags("verifier", Placement.COLOCATED)
    assert "drafter" not in flags("verifier", Placement.PLAIN)
    assert "--threads 1 --cores 3" in flags("drafter", Placement.SEPARATE)
    assert "--redis-url redis://r" in flags("scheduler", Placement.SEPARATE)
    assert "--concurrent-slowdown" in flags("scheduler", Placement.SEPARATE)
    assert "--concurrent-slowdown" not in flags("scheduler", Placement.COLOCATED)
    assert "--orchestrator 127.0.0.1:50054" in flags("gateway", Placement.SEPARATE)
    orchestrator = flags("orchestrator", Placement.SEPARATE, draft_length=0, wait_budget_us=10)
    assert (
        "--placement separate --drafters 127.0.0.1:50052 --draft-length 0 --wait-budget-us 10" in orchestrator
    )
    plain = flags("orchestrator", Placement.PLAIN, extra_flags={"orchestrator": ["--max-sequences", "2"]})
    assert plain.endswith("--placement none --max-sequences 2")


def test_another_module_for_a_role_and_a_proxy_in_front_of_one() -> None:
    fields = {"modules": {"drafter": "experiments.other"}, "endpoints": {"drafter": "127.0.0.1:7"}}
    assert "--drafters 127.0.0.1:7" in flags("orchestrator", Placement.SEPARATE, **fields)
    assert "--verifiers 127.0.0.1:50051" in flags("orchestrator", Placement.SEPARATE, **fields)
    assert "--port 50052" in flags("drafter", Placement.SEPARATE, **fields)
    # What a drafter of another module is made from need not be a checkpoint that a verifier can read.
    assert "--tap-from" not in flags("verifier", Placement.SEPARATE, **fields)
    assert "--tap-from" in flags("verifier", Placement.SEPARATE, endpoints=fields["endpoints"])
    apart = flags("orchestrator", Placement.SEPARATE, endpoints={"features": "127.0.0.1:8"})
    assert "--verifiers 127.0.0.1:50051" in apart
    assert "--feature-endpoints 127.0.0.1:8" in apart


def test_hints() -> None:
    def hint(*lines: str, exit_code: int | None = 1) -> str:
        return DeploymentError("verifier", "ended", lines, exit_code).hint

    assert "choose other ports" in hint("error: cannot listen on 127.0.0.1:50051")
    assert "pip install" in hint("ModuleNotFoundError: No module named 'ray'")
    assert "paceline models fetch" in hint("NotFetchedError: x")
    assert "memory" in hint(exit_code=-9)
    assert "paceline doctor" in hint("what?")


def test_on_two_cores_the_others_go_where_there_is_room() -> None:
    assert plan_cores(options(), range(2)).control == (0, 1)
    assert plan_cores(options(), range(3)).control == (2,)  # two threads wait for one that is interrupted
