"""The step loop: the one thread that runs the target.

Responsible for: running steps until the process ends, and sleeping while nothing is to be run.

Deliberately does not know: what a step does (`step.py`).

Called by: the verifier's host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
import torch

from services.verifier.inbox import VerifierInbox
from services.verifier.step import StepRunner

log = structlog.get_logger()


class StepLoop:
    """Runs steps on a thread of its own.

    Attributes:
        failure: what ended the thread; None while it runs, and after `stop`.
    """

    def __init__(self, runner: StepRunner, inbox: VerifierInbox) -> None:
        self._runner = runner
        self._inbox = inbox
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._on_start: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None

    def start(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Start the thread; it calls ``on_start`` first."""
        self._on_start = on_start
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finish the current step and end the thread."""
        self._runner.is_stopping = True
        self._inbox.wake()
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, for whatever reason."""
        return self._thread.is_alive()

    def _run(self) -> None:
        runner = self._runner
        try:
            self._on_start()
            try:
                with torch.inference_mode():
                    while not runner.is_stopping:
                        if not runner.run():
                            runner.idle()
            finally:
                runner.publish()
        except BaseException as error:  # the process must not continue without its loop
            self.failure = error
            log.exception("step loop failed")
