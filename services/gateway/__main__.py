"""Entry point of the gateway process.

Responsible for: reading settings and putting the parts together. Deliberately does not know: what the parts do.
Called by: ``paceline-gateway`` and ``python -m services.gateway``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.models import resolve, tokenizer_fingerprint
from paceline.v1 import generation_pb2, generation_pb2_grpc
from services.gateway.director import DirectorClient
from services.gateway.grammar_checker import ConstraintChecker
from services.gateway.requests import RequestChecker
from services.gateway.served_model import ModelWatch
from services.gateway.servicer import GenerationServicer
from services.gateway.settings import GatewaySettings
from services.gateway.tokenizer import ModelTokenizer
from services.runtime.lifecycle import serve
from services.runtime.process import Process
from services.runtime.settings import load


async def build(process: Process) -> None:
    """Adds the generation service to a process. The process is ready once the director has described the served
    model.
    """
    settings = process.settings
    assert isinstance(settings, GatewaySettings)
    model_dir = find_model_dir(settings.model)
    tokenizer = await asyncio.to_thread(ModelTokenizer.load, model_dir)
    fingerprint = await asyncio.to_thread(tokenizer_fingerprint, model_dir)
    director = DirectorClient(settings.orchestrator, settings.silence_timeout_s, process.tls)
    process.on_close(director.close)
    watch = ModelWatch(director.describe, settings.refresh_s, settings.served_model_name, fingerprint)
    constraints = ConstraintChecker(model_dir)
    servicer = GenerationServicer(
        tokenizer=tokenizer,
        checker=RequestChecker(tokenizer, settings.max_prompt_bytes),
        constraints=constraints,
        watch=watch,
        director=director,
        max_requests=settings.max_requests,
        default_timeout_s=settings.request_timeout_s,
    )
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, process.server)
    process.add_service_name(generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name)
    watching = asyncio.create_task(watch.run(), name="model watch")
    becoming_ready = asyncio.create_task(_ready_once_known(process, watch), name="readiness")

    async def stop() -> None:
        for task in (watching, becoming_ready):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.to_thread(constraints.close)

    process.on_close(stop)


def find_model_dir(model: str) -> Path:
    """The directory of the tokenizer; it need not contain weights.

    Raises:
        PacelineError: neither a directory with a tokenizer nor the name of a fetched model.
    """
    path = Path(model)
    return path if (path / "tokenizer.json").is_file() else resolve(model)


async def _ready_once_known(process: Process, watch: ModelWatch) -> None:
    await watch.known.wait()
    await process.ready()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the gateway until SIGTERM."""
    serve("gateway", load(GatewaySettings, sys.argv[1:] if argv is None else argv), build)


if __name__ == "__main__":
    main()
