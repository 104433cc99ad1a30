"""A gateway in this process, over real sockets, in front of a scripted orchestrator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from grpc import aio

from paceline.models import cached
from paceline.v1 import generation_pb2_grpc
from services.gateway.__main__ import build
from services.gateway.settings import GatewaySettings
from services.gateway.tokenizer import ModelTokenizer
from tests.gateway.tiny_model import write_model_dir
from tests.hosting import hosted

Gateway = Callable[..., AbstractAsyncContextManager[generation_pb2_grpc.GenerationServiceStub]]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> ModelTokenizer:
    return ModelTokenizer.load(model_dir)


@pytest.fixture
def gateway(model_dir: Path) -> Gateway:
    @asynccontextmanager
    async def run(orchestrator: str, **fields) -> AsyncIterator[generation_pb2_grpc.GenerationServiceStub]:
        settings = GatewaySettings(
            model=str(model_dir),
            orchestrator=orchestrator,
            port=0,
            metrics_port=None,
            refresh_s=0.1,
            drain_s=0.5,
            **fields,
        )
        async with (
            hosted("gateway", settings, build) as process,
            aio.insecure_channel(f"127.0.0.1:{process.port}") as channel,
        ):
            yield generation_pb2_grpc.GenerationServiceStub(channel)

    return run


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    """The default model in the cache, where it has been fetched."""
    path = cached("smollm2-135m")
    if path is None:
        pytest.skip(
            "smollm2-135m is not in the model cache; `paceline models fetch smollm2-135m` puts it there"
        )
    return path
