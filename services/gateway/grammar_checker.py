"""Constraints of requests, checked before the request is admitted.

Responsible for: checking on a thread of its own, so that a slow grammar delays only other requests with grammars.
Deliberately does not know: grammars, streams. Called by :mod:`services.gateway.servicer`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.contract.errors import CapacityError
from paceline.grammar.checker import GrammarChecker
from paceline.grammar.refusal import ConstraintError
from paceline.v1 import sampling_pb2
from services.gateway.served_model import ServedModel
from services.runtime.sampling import sampling_params

MAX_WAITING = 256
"""Requests that may wait for the check; one more is refused."""


class ConstraintChecker:
    """Checks constraints against the served model's tokenizer.

    Args:
        model_dir: where tokenizer.json is.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._num_waiting = 0
        self._checker: GrammarChecker | None = None
        self._checked_for: tuple[int, tuple[int, ...]] = (0, ())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def check(self, sampling: sampling_pb2.SamplingParams, model: ServedModel) -> None:
        """Return if the request has no constraint, or one that can be honoured.

        Raises:
            InvalidRequestError: naming the form, such as ``sampling.constraint.regex``.
            CapacityError: too many requests wait for the check.
            UnavailableError: constraints cannot be checked here.
        """
        if not sampling.HasField("constraint"):
            return
        if self._num_waiting >= MAX_WAITING:
            raise CapacityError(f"{self._num_waiting} requests wait for the check of their constraint")
        self._num_waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._check, sampling, model)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """End the thread and the child process."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._checker is not None:
            self._checker.close()

    def _check(self, sampling: sampling_pb2.SamplingParams, model: ServedModel) -> None:
        constraint = sampling_params(sampling).constraint
        assert constraint is not None
        wanted = (model.vocab_size, model.eos_token_ids)
        if self._checker is None or self._checked_for != wanted:
            if self._checker is not None:
                self._checker.close()
            self._checker, self._checked_for = GrammarChecker(self._model_dir, *wanted), wanted
        try:
            self._checker.check(constraint)
        except ConstraintError as error:
            raise error.inside("sampling") from None
