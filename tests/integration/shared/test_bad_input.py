"""A bad request fails alone, naming the field, whatever else runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from paceline.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2
from tests.integration.conftest import Site

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

Sampling = sampling_pb2.SamplingParams
Stop = sampling_pb2.StopCondition


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    if not {"text", "chat", "tokens"} & set(fields):
        fields["text"] = "Hello"
    return generation_pb2.GenerateRequest(**fields)


BAD = [
    (request(model="nobody"), "model"),
    (request(text=""), "text"),
    (request(text="word " * 20_000), "text"),
    (request(sampling=Sampling(temperature=-1)), "sampling.temperature"),
    (request(sampling=Sampling(temperature=float("nan"))), "sampling.temperature"),
    (request(tokens=generation_pb2.TokenPrompt(token_ids=[49152])), "tokens.token_ids[0]"),
    (request(max_tokens=0), "max_tokens"),
    (request(max_tokens=10**9), "max_tokens"),
    (request(stop=[Stop(type=9)]), "stop[0].type"),
    (request(sampling=Sampling(repetition_penalty=0)), "sampling.repetition_penalty"),
    (request(sampling=Sampling(logit_bias={49152: 1.0})), "sampling.logit_bias[49152]"),
    (request(sampling=Sampling(bad_runs=[{"token_ids": [1, 49152]}])), "sampling.bad_runs[0].token_ids[1]"),
    (request(bad_words=["fine", ""]), "bad_words[1]"),
    (request(log_probs={"num_top": 21}), "log_probs.num_top"),
    (request(n=17), "n"),
]


def test_every_bad_request_is_refused_by_name_and_nothing_else_notices(
    apart: Site, prompts: list[str]
) -> None:
    parameters = {"temperature": 0.0, "max_tokens": 48}
    expected = apart.complete(prompts[3], **parameters).token_ids
    with (
        ThreadPoolExecutor(1) as pool,
        grpc.insecure_channel(apart.deployment.gateway_endpoint) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        running = pool.submit(apart.complete, prompts[3], **parameters)
        for bad, field in BAD:
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(bad, timeout=30))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, field
            assert field in violated_fields(caught.value)
        assert running.result(timeout=120).token_ids == expected


def violated_fields(error: Any) -> list[str]:
    """Fields named by the error's google.rpc.BadRequest."""
    status = rpc_status.from_call(error)
    assert status is not None
    found = []
    for detail in status.details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            found += [violation.field for violation in bad_request.field_violations]
    return found
