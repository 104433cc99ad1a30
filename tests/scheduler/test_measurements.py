"""Measurements: merging, JSON, estimators, and frames from the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.contract.errors import InvalidRequestError
from paceline.contract.limits import MAX_PEER_PAIRS
from paceline.scheduling.reliability import Reliability
from paceline.v1 import scheduler_pb2
from services.scheduler.draft_acceptance import DrafterAcceptance
from services.scheduler.measurements import (
    MAX_SAMPLES_PER_BUCKET,
    PARTS,
    AcceptancePart,
    CurvePart,
    DraftAcceptancePart,
    DraftTimePart,
    Measurements,
    NetworkPart,
    Part,
    TenantsPart,
)
from services.scheduler.reports import measurements_of
from services.scheduler.subject import Subject
from services.scheduler.tenants import Use

US = st.integers(1, 10_000_000)


@st.composite
def counts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    drafted = sorted(draw(st.lists(st.integers(0, 500), max_size=8)), reverse=True)
    accepted: list[int] = []
    for limit in drafted:
        accepted.append(draw(st.integers(0, min([limit, *accepted[-1:]]))))
    return tuple(drafted), tuple(accepted)


def network(pairs: list[tuple[list[int], str]]) -> NetworkPart:
    part = NetworkPart()
    for round_trips, drafter in pairs:
        part = part.merged(NetworkPart.of(round_trips, round_trips[:2], ("conductor", drafter)))
    return part


def outcomes(cells: list[tuple[int, int, int, float]]) -> DraftAcceptancePart:
    table = Reliability.of((i, c / 255, n, int(n * share)) for i, c, n, share in cells if n)
    return DraftAcceptancePart({"eagle3": DrafterAcceptance(table, table)} if table.count else {})


MEASUREMENTS = st.builds(
    Measurements,
    st.lists(st.tuples(st.integers(1, 300), US), max_size=20).map(CurvePart.of),
    counts().map(lambda pair: AcceptancePart.of(*pair)),
    st.lists(st.tuples(st.integers(1, 16), US), max_size=10).map(DraftTimePart.of),
    st.lists(
        st.tuples(st.lists(st.integers(0, 10_000_000), max_size=50), st.sampled_from("abc")), max_size=4
    ).map(network),
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 255), st.integers(0, 50), st.floats(0, 1)), max_size=20
    ).map(outcomes),
    st.dictionaries(st.sampled_from("xyz"), st.builds(Use, *(st.integers(0, 1000) for _ in range(5)))).map(
        lambda uses: TenantsPart({name: use for name, use in uses.items() if use.num_requests})
    ),
)


def rounded(part: Part) -> Any:
    return json.loads(
        json.dumps(part.to_dict()), parse_float=lambda text: pytest.approx(float(text), rel=1e-9, abs=1e-9)
    )


@given(MEASUREMENTS, MEASUREMENTS, MEASUREMENTS)
@settings(deadline=None, max_examples=60)
def test_merging_is_associative(a: Measurements, b: Measurements, c: Measurements) -> None:
    one, other = a.merged(b).merged(c), a.merged(b.merged(c))
    for left, right in zip(one.parts(), other.parts(), strict=True):
        assert left.to_dict() == rounded(right)


@given(MEASUREMENTS)
@settings(deadline=None, max_examples=60)
def test_json_round_trip_and_neutral_element(known: Measurements) -> None:
    for part in known.parts():
        assert type(part).from_dict(json.loads(json.dumps(part.to_dict()))) == part
        part.estimator()
    assert known.merged(Measurements()) == known
    assert Measurements().merged(known) == known


@given(
    kind=st.sampled_from(PARTS),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=6)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "buckets",
                        "rows",
                        "count",
                        "samples",
                        "attempts",
                        "accepts",
                        "peers",
                        "drafters",
                        "cells",
                    ]
                ),
                inner,
            )
        ),
        max_leaves=12,
    ),
)
@settings(deadline=None, max_examples=300)
def test_any_stored_value_is_refused_or_usable(kind: type[Part], value: Any) -> None:
    if not isinstance(value, dict):
        return
    try:
        part = kind.from_dict(value)
    except (ValueError, KeyError, TypeError):
        return
    part.estimator()
    json.dumps(part.to_dict(), allow_nan=False)


def spoiled(value: Any, data: st.DataObject) -> Any:
    """The value with one thing in it replaced by something else."""
    odd = st.sampled_from(
        [None, True, -1, 0, 1e300, float("nan"), 2**70, "", "x", "\n", [], {}, [[]], {"a": 1}]
    )
    if isinstance(value, dict) and value and data.draw(st.integers(0, 5)):
        name = data.draw(st.sampled_from(sorted(value)))
        return {**value, name: spoiled(value[name], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 5)):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], spoiled(value[place], data), *value[place + 1 :]]
    return data.draw(odd)


@given(MEASUREMENTS, st.data())
@settings(deadline=None, max_examples=300)
def test_a_spoiled_value_is_refused_or_usable(known: Measurements, data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(known.parts()))
    value = spoiled(json.loads(json.dumps(part.to_dict())), data)
    if not isinstance(value, dict):
        return
    try:
        read = type(part).from_dict(value)
    except (ValueError, KeyError, TypeError):
        return
    read.estimator()
    json.dumps(read.merged(part).to_dict(), allow_nan=False)  # type: ignore[arg-type]  # of one kind


def test_curve_keeps_the_newest_samples_and_predicts() -> None:
    curve = CurvePart.of([(1, 90_000)] * 40 + [(1, 10_000)] * 40 + [(8, 16_000)] * 5)
    assert len(curve.buckets[1][1]) == MAX_SAMPLES_PER_BUCKET
    assert curve.buckets[1][0] == 80
    assert curve.count == 85
    assert curve.estimator().seconds(1) == pytest.approx(0.010)
    assert curve.estimator().seconds(8) == pytest.approx(0.016)


def test_acceptance_of_drafts_of_one_length_is_exact() -> None:
    part = AcceptancePart.of((1000, 1000, 1000), (800, 400, 100))
    rates = part.estimator().rates(3)
    assert rates == pytest.approx((0.8, 0.5, 0.25), abs=0.01)


def test_acceptance_of_mixed_lengths_counts_only_trials() -> None:
    # 100 passes of length 1 and 100 of length 2; every first token is accepted, half of the second ones.
    rates = AcceptancePart.of((200, 100), (200, 50)).estimator().rates(2)
    assert rates[1] == pytest.approx(0.5, abs=0.03)


def test_acceptance_follows_a_change_and_is_bounded_in_weight() -> None:
    old = AcceptancePart.of((1_000_000,), (900_000,))
    part = old.merged(AcceptancePart.of((3000,), (600,)))
    assert part.estimator().rates(1)[0] == pytest.approx(0.2, abs=0.12)
    assert old.attempts[0] < 2000


def test_draft_time_is_a_line() -> None:
    part = DraftTimePart.of([(k, 2000 + 1000 * k) for k in (1, 2, 4, 8)] * 5)
    assert part.estimator().seconds(6) == pytest.approx(0.008, rel=1e-3)


def test_round_trip_quantiles() -> None:
    estimator = NetworkPart.of(range(1000, 2000, 10)).estimator()
    assert estimator.mean_s == pytest.approx(0.0016, abs=2e-4)
    assert estimator.p95_s == pytest.approx(0.00194, rel=0.03)


def request(**fields: Any) -> scheduler_pb2.ReportRequest:
    return scheduler_pb2.ReportRequest(**fields)


def step(**fields: int) -> scheduler_pb2.StepSample:
    return scheduler_pb2.StepSample(**{"num_rows": 1, "num_sequences": 1, "step_us": 5, **fields})


def draft(**fields: int) -> scheduler_pb2.DraftSample:
    return scheduler_pb2.DraftSample(**{"num_draft_steps": 1, "num_sequences": 1, "draft_us": 5, **fields})


def tenant(**fields: Any) -> scheduler_pb2.TenantUse:
    good: dict[str, Any] = {
        "tenant": "acme",
        "num_requests": 2,
        "num_tokens": 22,
        "num_draft_tokens": 8,
        "num_accepted_tokens": 4,
        "decode_us": 500_000,
    }
    return scheduler_pb2.TenantUse(**{**good, **fields})


PEER = scheduler_pb2.PeerPair(conductor="c:1", drafter="d:2")


def outcome(**fields: Any) -> scheduler_pb2.AcceptanceCounts:
    good: dict[str, Any] = {
        "drafter": "eagle3",
        "cells": [256 + 128],
        "trials": [2],
        "accepted": [1],
        "calibrated": [128],
        "calibrated_trials": [2],
        "calibrated_accepted": [1],
    }
    return scheduler_pb2.AcceptanceCounts(**{**good, **fields})


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (request(steps=[step(num_rows=0)]), "steps.num_rows"),
        (request(steps=[step(num_sequences=2)]), "steps.num_sequences"),
        (request(steps=[step(step_us=2**32 - 1)]), "steps.step_us"),
        (request(drafts=[draft(num_draft_steps=0)]), "drafts.num_draft_steps"),
        (request(drafts=[draft(num_sequences=0)]), "drafts.num_sequences"),
        (request(drafts=[draft(draft_us=2**32 - 1)]), "drafts.draft_us"),
        (request(round_trips_us=[2**32 - 1]), "round_trips_us"),
        (request(round_trips_us=[1] * 5000), "round_trips_us"),
        (request(queues_us=[2**32 - 1]), "queues_us"),
        (request(steps=[step(num_context_tokens=2**50)]), "steps.num_context_tokens"),
        (request(round_trips_us=[1, 2], round_trip_peers=[0], peers=[PEER]), "round_trip_peers"),
        (request(round_trips_us=[1], round_trip_peers=[1], peers=[PEER]), "round_trip_peers"),
        (request(queues_us=[1], queue_peers=[0]), "queue_peers"),
        (request(peers=[PEER] * 65), "peers"),
        (request(peers=[scheduler_pb2.PeerPair(drafter="a\nb")]), "peers.drafter"),
        (request(acceptance=[outcome(drafter="x" * 201)]), "acceptance.drafter"),
        (request(acceptance=[outcome(cells=[64 * 256])]), "acceptance.cells"),
        (request(acceptance=[outcome(accepted=[3])]), "acceptance.cells: accepted"),
        (request(acceptance=[outcome(trials=[])]), "acceptance.cells"),
        (request(acceptance=[outcome(calibrated=[256])]), "acceptance.calibrated"),
        (request(tenants=[tenant(tenant="a b")]), "tenants.tenant"),
        (request(tenants=[tenant(tenant="")]), "tenants.tenant"),
        (request(tenants=[tenant(num_accepted_tokens=9)]), "tenants.num_accepted_tokens"),
        (request(tenants=[tenant(decode_us=2**60)]), "tenants.decode_us"),
        (request(tenants=[tenant()] * 66), "tenants"),
        (request(accepted_per_position=[0]), "accepted_per_position"),
        (request(drafted_per_position=[1], accepted_per_position=[2]), "accepted_per_position"),
        (request(drafted_per_position=[1, 2], accepted_per_position=[0, 0]), "drafted_per_position"),
        (request(drafted_per_position=[2, 2], accepted_per_position=[0, 1]), "accepted_per_position"),
        (request(drafted_per_position=[1] * 65, accepted_per_position=[1] * 65), "drafted_per_position"),
        (request(num_running_sequences=2**31), "num_running_sequences"),
        (request(longest_draft=2**31), "longest_draft"),
    ],
)
def test_impossible_frames_are_refused_by_field(frame: scheduler_pb2.ReportRequest, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        measurements_of(frame)
    assert caught.value.field == field


def test_a_frame_becomes_a_delta() -> None:
    delta = measurements_of(
        request(
            steps=[step(step_us=0), step(num_rows=5, step_us=700)],
            drafts=[draft(num_draft_steps=4, draft_us=900), draft(draft_us=0)],
            round_trips_us=[0, 200],
            drafted_per_position=[3, 3],
            accepted_per_position=[2, 1],
        )
    )
    assert [part.count for part in delta.parts()] == [1, 3, 1, 2, 0, 0]
    assert measurements_of(request()).is_empty
    shorter = measurements_of(request(drafted_per_position=[9, 9, 9], accepted_per_position=[4]))
    assert shorter.acceptance == AcceptancePart.of((9, 9, 9), (4, 0, 0))


@given(
    st.builds(
        scheduler_pb2.ReportRequest,
        steps=st.lists(
            st.builds(
                scheduler_pb2.StepSample,
                num_rows=st.integers(0, 2**32 - 1),
                num_sequences=st.integers(0, 3),
                step_us=st.integers(0, 2**32 - 1),
            ),
            max_size=4,
        ),
        drafted_per_position=st.lists(st.integers(0, 2**32 - 1), max_size=4),
        accepted_per_position=st.lists(st.integers(0, 2**32 - 1), max_size=4),
        round_trips_us=st.lists(st.integers(0, 2**32 - 1), max_size=4),
    )
)
@settings(deadline=None)
def test_any_frame_is_refused_or_usable(frame: scheduler_pb2.ReportRequest) -> None:
    try:
        delta = measurements_of(frame)
    except InvalidRequestError:
        return
    for part in delta.parts():
        part.estimator()


def key(**fields: str) -> scheduler_pb2.MeasurementKey:
    good = {
        "model_fingerprint": "ab12",
        "dtype": "bfloat16",
        "device_name": "Intel(R) Xeon(R): 2 threads",
        "method": "eagle3",
        "placement": "separate",
    }
    return scheduler_pb2.MeasurementKey(**{**good, **fields})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_fingerprint": ""}, "key.model_fingerprint"),
        ({"dtype": ""}, "key.dtype"),
        ({"device_name": "x" * 201}, "key.device_name"),
        ({"method": "a\nb"}, "key.method"),
        ({"placement": "elsewhere"}, "key.placement"),
    ],
)
def test_bad_keys_are_refused(fields: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Subject.from_proto(key(**fields))
    assert caught.value.field == named


def test_redis_keys_are_readable_and_cannot_collide() -> None:
    subject = Subject.from_proto(key())
    assert subject.redis_key("curve") == (
        "paceline:v1:ab12:bfloat16:Intel%28R%29%20Xeon%28R%29%3A%202%20threads:eagle3:separate:curve"
    )
    plain = Subject.from_proto(key(method="", placement=""))
    assert plain.redis_key("policy").endswith(":none:none:policy")
    assert not plain.is_speculative
    shifted = Subject.from_proto(key(dtype="b:c", device_name="d"))
    assert shifted.redis_key("x") != Subject.from_proto(key(dtype="b", device_name="c:d")).redis_key("x")


def test_round_trips_and_waits_are_kept_by_pair() -> None:
    other = scheduler_pb2.PeerPair(conductor="c:1", drafter="d:3")
    delta = measurements_of(
        request(
            peers=[PEER, other],
            round_trips_us=[400, 9000, 420],
            round_trip_peers=[0, 1, 0],
            queues_us=[50],
            queue_peers=[1],
        )
    )
    near, far = delta.network.pairs["c:1", "d:2"], delta.network.pairs["c:1", "d:3"]
    assert (near.round_trip.count, near.queue.count, far.round_trip.count, far.queue.count) == (2, 0, 1, 1)
    assert near.round_trip.p50_s == pytest.approx(400e-6, rel=0.1)
    assert far.round_trip.p50_s == pytest.approx(9e-3, rel=0.1)
    assert far.queue.p50_s == pytest.approx(50e-6, rel=0.1)
    assert delta.network.estimator().count == 3


def test_pairs_and_drafters_are_bounded() -> None:
    part, table = NetworkPart(), DraftAcceptancePart()
    for i in range(200):
        part = part.merged(NetworkPart.of([100], (), ("c", f"d{i}")))
        reliability = Reliability.of([(0, 0.5, 1, 1)])
        table = table.merged(DraftAcceptancePart({f"d{i}": DrafterAcceptance(reliability, reliability)}))
    assert len(part.pairs) == MAX_PEER_PAIRS + 1
    assert part.count == 200
    assert NetworkPart.from_dict(json.loads(json.dumps(part.to_dict()))).count == 200
    assert table.count == 200
    assert DraftAcceptancePart.from_dict(json.loads(json.dumps(table.to_dict()))).count == 200


def test_outcomes_of_a_frame_become_tables_and_an_error() -> None:
    delta = measurements_of(
        request(
            acceptance=[
                outcome(
                    cells=[230, 256 + 51],
                    trials=[100, 50],
                    accepted=[60, 10],
                    calibrated=[153, 51],
                    calibrated_trials=[100, 50],
                    calibrated_accepted=[60, 10],
                )
            ]
        )
    )
    tables = delta.outcomes.drafters["eagle3"]
    assert tables.own.by_position() == [(0.6, 100), (0.2, 50)]
    assert tables.own.error == pytest.approx((100 * (230 / 255 - 0.6) + 0) / 150, abs=1e-6)
    assert tables.calibrated.error == pytest.approx(0, abs=1e-6)
    assert [rate for _, rate, _ in tables.own.diagram()] == pytest.approx([0.2, 0.6])


def test_the_curve_knows_context_and_sequences() -> None:
    steps = [
        (rows, 10_000 + 100 * rows + 2 * context + 300 * sequences, sequences, context)
        for context in range(0, 4000, 250)
        for rows, sequences in ((4, 1), (4, 2), (8, 1), (8, 4))
    ]
    part = CurvePart.from_dict(json.loads(json.dumps(CurvePart.of(steps, at_ms=7).to_dict())))
    curve = part.estimator()
    assert curve.per_context_token_s == pytest.approx(2e-6, rel=0.05)
    assert curve.seconds(8, 2, 3000) == pytest.approx(0.0174, rel=0.02)


def test_tenants_are_summed_and_bounded() -> None:
    part = measurements_of(request(tenants=[tenant()])).tenants
    part = part.merged(part)
    use = part.tenants["acme"]
    assert (use.num_requests, use.acceptance, use.tokens_per_s) == (4, 0.5, 40.0)
    for i in range(100):
        part = part.merged(TenantsPart({f"t{i}": Use(num_requests=1)}))
    assert len(part.tenants) == 65
    assert part.tenants["other"].num_requests == 100 - 63
    assert TenantsPart.from_dict(json.loads(json.dumps(part.to_dict()))) == part
