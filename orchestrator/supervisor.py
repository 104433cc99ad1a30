"""Ray: the cluster and the actors.

Responsible for: starting an embedded Ray (or joining a cluster), creating the director and one conductor per verifier
as actors that Ray restarts for ever, polling the director, and leaving nothing behind. Deliberately does not know what
the actors do. Run by orchestrator.__main__.

Traps that are handled here: Ray replaces 127.0.0.1 by the machine's main address, so an embedded Ray gets another
loopback address. Ray leaves its session directory behind, so an embedded Ray gets a directory that is removed at the
end. The environment of Ray is set by orchestrator.ray_environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

import ray
import structlog
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.conductor import Conductor
from orchestrator.director import ConductorHandle, Director, DirectorStatus
from orchestrator.settings import OrchestratorSettings
from orchestrator.status import ConductorStatus
from services.runtime.logs import configure_logs

CALL_TIMEOUT_S = 10.0

log = structlog.get_logger()


Actor = Any
"""A Ray actor handle: its methods are made at run time."""


class RayConductor:
    """A conductor actor as the director sees it.

    The director's arguments carry it, and it holds the actor's name only. An actor handle would move the arguments into
    Ray's object store, and a director whose arguments are lost cannot be restarted.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: Actor = None

    def start(self) -> Awaitable[ConductorStatus]:
        """Starts the conductor unless it runs, and returns its status."""
        status: Awaitable[ConductorStatus] = self._handle().start.remote()
        return status

    def shutdown(self, drain_s: float) -> Awaitable[None]:
        """Drains and stops the conductor."""
        done: Awaitable[None] = self._handle().shutdown.remote(drain_s)
        return done

    def _handle(self) -> Actor:
        """The actor, looked up once; the handle stays valid when Ray restarts the actor."""
        if self._actor is None:
            look_up: Any = ray.get_actor
            self._actor = look_up(self._name)
        return self._actor


class ConductorActor(Conductor):
    """A conductor in a Ray worker."""

    def __init__(self, settings: OrchestratorSettings, verifier_endpoint: str, home_node_id: str) -> None:
        configure_logs("conductor", level=settings.log_level, as_json=settings.log_json)
        context = ray.get_runtime_context()
        super().__init__(
            settings, verifier_endpoint, advertised_host(settings, context.get_node_id() == home_node_id)
        )

    async def pid(self) -> int:
        """Process id of the worker, for logs and fault tests."""
        return os.getpid()


class DirectorActor(Director):
    """The director in a Ray worker."""

    def __init__(self, settings: OrchestratorSettings, conductors: Mapping[str, ConductorHandle]) -> None:
        configure_logs("director", level=settings.log_level, as_json=settings.log_json)
        super().__init__(settings, conductors)

    async def pid(self) -> int:
        """Process id of the worker, for logs and fault tests."""
        return os.getpid()


def advertised_host(settings: OrchestratorSettings, is_home: bool) -> str:
    """The host at which clients reach a conductor: on the orchestrator's node the advertised one, else the node's."""
    if is_home and settings.advertise_host:
        return settings.advertise_host
    if settings.host not in ("0.0.0.0", "::", "[::]"):
        return settings.host
    if settings.ray_address is None:
        return "127.0.0.1"
    address: str = ray.util.get_node_ip_address()
    return address


def free_port(host: str) -> int:
    """A TCP port that no process uses now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        port: int = probe.getsockname()[1]
    return port


def _name(verifier_endpoint: str) -> str:
    """The actor name of a verifier's conductor, within the orchestrator's own Ray namespace."""
    return f"conductor of {verifier_endpoint}"


class Supervisor:
    """The actors of one orchestrator process.

    Attributes:
        director: the director actor; None before Ray runs.
        conductors: the conductor actors, by verifier endpoint.
        status: the director's last status; None before it answered.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        # A director that Ray restarts must come back on the same port, so a free port is chosen once, here.
        port = settings.port or free_port(settings.host)
        self._settings = settings.model_copy(update={"port": port})
        self._temp_dir: Path | None = None
        self.status: DirectorStatus | None = None
        self.director: Actor = None
        self.conductors: dict[str, Actor] = {}

    def start_ray(self) -> None:
        """Starts or joins Ray and creates the actors; blocks for some seconds."""
        settings = self._settings
        namespace = f"paceline-{uuid.uuid4().hex[:12]}"
        if settings.ray_address is None:
            self._temp_dir = Path(tempfile.mkdtemp(prefix="paceline-ray-"))
            ray.init(
                num_cpus=settings.ray_num_cpus,
                num_gpus=0,
                namespace=namespace,
                include_dashboard=False,
                log_to_driver=True,
                logging_level=logging.WARNING,
                _node_ip_address=settings.ray_node_ip,
                _temp_dir=str(self._temp_dir),
            )
        else:
            ray.init(address=settings.ray_address, namespace=namespace, logging_level=logging.WARNING)
        self.create_actors()

    def create_actors(self) -> None:
        """Creates director and conductors in the Ray that this process is connected to."""
        settings = self._settings
        home = ray.get_runtime_context().get_node_id()
        # Actors wait on sockets; they must not queue for processors that Ray counts as busy.
        remote: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
        conductor_class = remote(ConductorActor)
        self.conductors = {
            endpoint: conductor_class.options(name=_name(endpoint)).remote(settings, endpoint, home)
            for endpoint in settings.verifiers
        }
        # The director's port belongs to this node's address.
        here = NodeAffinitySchedulingStrategy(node_id=home, soft=False)
        director_class = remote(DirectorActor).options(scheduling_strategy=here)
        handles = {endpoint: RayConductor(_name(endpoint)) for endpoint in self.conductors}
        self.director = director_class.remote(settings, handles)

    async def poll(self) -> DirectorStatus | None:
        """The director's status, None if it does not answer; starts a director that Ray has restarted."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                self.status = await self.director.start.remote()
        except (ray.exceptions.RayError, TimeoutError) as error:
            log.warning("the director does not answer", error=f"{type(error).__name__}: {error}")
            return None
        return self.status

    async def shutdown(self) -> None:
        """Drains director and conductors within drain_s."""
        drain_s = self._settings.drain_s
        try:
            async with asyncio.timeout(drain_s + CALL_TIMEOUT_S):
                await self.director.shutdown.remote(drain_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            log.warning("the director did not drain in time", error=f"{type(error).__name__}: {error}")

    def stop_ray(self) -> None:
        """Ends the actors and the embedded Ray, and removes Ray's files; also after a start that failed."""
        for actor in (self.director, *self.conductors.values()):
            if actor is not None:
                ray.kill(actor, no_restart=True)
        ray.shutdown()
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
