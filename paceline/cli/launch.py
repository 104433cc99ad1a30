"""Starting a deployment from the command line.

Responsible for: from names of models and drafters to directories, showing the start, signals, and hints when a
process does not start. Deliberately does not know: what is done with the deployment. Called by ``paceline up``
and ``paceline generate``.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console

from paceline.assets import SHIPPED_DRAFTERS, drafters_dir, shipped_drafter
from paceline.contract.errors import InvalidRequestError
from paceline.embedded import Deployment, DeploymentOptions, Placement
from paceline.embedded.failure import DeploymentError
from paceline.embedded.promised_drafter import wait_for_drafter
from paceline.models import resolve

_DRAFTER_TIMEOUT_S = 15.0


def find_model(name_or_path: str) -> Path:
    """Directory of a model.

    Raises:
        PacelineError: it does not exist here; the message says how to get it.
    """
    return resolve(name_or_path).resolve()


def find_drafter(given: str | None, model: str) -> Path | None:
    """Directory of a drafter: the given one, or the one that ships for this model; None if none ships.

    Raises:
        InvalidRequestError: the given one does not exist.
    """
    if given is None:
        return shipped_drafter(Path(model).name)
    for path in (Path(given), drafters_dir() / given):
        if path.is_dir():
            return path.resolve()
    raise InvalidRequestError(
        "drafter", f"{given!r} is neither a directory nor the name of a drafter that ships ({_shipped()})"
    )


def _shipped() -> str:
    return ", ".join(f"{drafter} for {model}" for model, drafter in sorted(SHIPPED_DRAFTERS.items()))


def choose_placement(
    wanted: Placement | None, drafter: Path | None, model: str, console: Console
) -> Placement:
    """The given placement; by default a separate drafter if there is a drafter, else plain decoding.

    Raises:
        InvalidRequestError: the given placement needs a drafter, and there is none.
    """
    if wanted in (Placement.COLOCATED, Placement.SEPARATE) and drafter is None:
        raise InvalidRequestError(
            "drafter",
            f"--placement {wanted} needs a drafter, and none ships for {Path(model).name}: pass --drafter DIRECTORY "
            f"(`paceline train` makes one), or --placement plain. Shipped drafters: {_shipped()}",
        )
    if wanted is not None:
        return wanted
    if drafter is not None:
        return Placement.SEPARATE
    console.print(
        "no drafter ships for this model: plain decoding (train one with `paceline train`, or pass --drafter)"
    )
    return Placement.PLAIN


class _Interrupted(BaseException):
    """A signal ended the block; no handler of Exception may swallow it."""


@contextlib.contextmanager
def running(options: DeploymentOptions, console: Console) -> Iterator[Deployment]:
    """Runs a deployment around a block. Ctrl-C and SIGTERM end the block and then every process, in order.

    A second signal ends the processes at once. Exits with status 1 if a process does not start.
    """
    with _Progress(console) as progress:
        deployment = Deployment(options, progress)
        with _Signals() as signals:
            try:
                started_at = time.monotonic()
                try:
                    deployment.start()
                except DeploymentError as error:
                    _explain(error, console)
                    raise typer.Exit(1) from None
                missing = wait_for_drafter(
                    deployment.endpoint("orchestrator"),
                    options.placement,
                    _DRAFTER_TIMEOUT_S,
                    lambda: bool(deployment.dead()),
                )
                progress.end()
                console.print(f"ready after {time.monotonic() - started_at:.1f} s")
                if missing:
                    console.print(f"decoding is plain for now: {missing}", style="yellow", markup=False)
                yield deployment
            except _Interrupted:
                raise typer.Exit(130) from None
            finally:
                signals.force_from_now_on(deployment)
                progress.begin("stopping")
                deployment.stop()


def _explain(error: DeploymentError, console: Console) -> None:
    console.print(f"{error}", style="bold red", markup=False)
    for line in error.log_lines:
        console.print(f"  {line}", style="dim", markup=False)
    console.print(f"what to do: {error.hint}", markup=False)


class _Progress:
    """Shows which processes have not started yet, on terminals only."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting: list[str] = []
        self._status = console.status("starting")

    def __enter__(self) -> _Progress:
        self.begin("starting")
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def begin(self, text: str) -> None:
        if self._console.is_terminal:
            self._status.update(text)
            self._status.start()

    def end(self) -> None:
        self._status.stop()

    def __call__(self, role: str, state: str) -> None:
        if state == "starting":
            self._waiting.append(role)
        elif role in self._waiting:
            self._waiting.remove(role)
        if self._waiting:
            self._status.update(f"waiting for {', '.join(self._waiting)}")


class _Signals:
    """SIGINT and SIGTERM raise in the main thread. Once the end has begun, they end every process at once."""

    def __enter__(self) -> _Signals:
        self._deployment: Deployment | None = None
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def force_from_now_on(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._deployment is None:
            raise _Interrupted
        self._deployment.kill_all()
