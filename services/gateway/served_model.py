"""What the deployment serves, as the director last described it.

Responsible for: the limits that requests are checked against, and refreshing them. Deliberately does not know:
requests, tokens. Called by :mod:`services.gateway.servicer`; the watch runs beside the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from paceline.contract.errors import IncompatiblePeerError, PacelineError, UnavailableError
from paceline.v1 import orchestrator_pb2


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The target in service and its limits."""

    name: str
    fingerprint: str
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    method: str
    placement: str

    @classmethod
    def from_deployment(
        cls,
        deployment: orchestrator_pb2.DescribeDeploymentResponse,
        name: str | None,
        tokenizer_fingerprint: str,
    ) -> ServedModel:
        """Reads the director's answer.

        Args:
            deployment: the answer.
            name: name that requests use; None takes the verifier's.
            tokenizer_fingerprint: of the gateway's own tokenizer; empty skips the comparison.

        Raises:
            IncompatiblePeerError: the target's tokenizer differs from this gateway's.
        """
        verifier = deployment.verifier
        theirs = verifier.tokenizer_fingerprint
        if theirs and tokenizer_fingerprint and theirs != tokenizer_fingerprint:
            raise IncompatiblePeerError(
                f"the verifier's tokenizer is {theirs[:12]}, this gateway's is {tokenizer_fingerprint[:12]}: "
                "give both the same --model"
            )
        if verifier.vocab_size == 0 or verifier.max_positions == 0:
            raise UnavailableError("the director does not know its verifier yet")
        own_method = [verifier.method] if verifier.method else []
        methods = own_method + [drafter.method for drafter in deployment.drafters if drafter.method]
        return cls(
            name=name or verifier.model_name,
            fingerprint=verifier.model_fingerprint,
            vocab_size=verifier.vocab_size,
            max_positions=verifier.max_positions,
            eos_token_ids=tuple(verifier.eos_token_ids),
            method=methods[0] if methods else "",
            placement=deployment.placement or "none",
        )


class ModelWatch:
    """The served model, refreshed from the director at intervals.

    Args:
        describe: asks the director once.
        refresh_s: pause between two refreshes.
        name: name that requests use; None takes the verifier's.
        tokenizer_fingerprint: of the gateway's own tokenizer; empty skips the comparison.
    """

    def __init__(
        self,
        describe: Callable[[], Awaitable[orchestrator_pb2.DescribeDeploymentResponse]],
        refresh_s: float,
        name: str | None = None,
        tokenizer_fingerprint: str = "",
    ) -> None:
        self._describe = describe
        self._refresh_s = refresh_s
        self._name = name
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._model: ServedModel | None = None
        self._why_not: PacelineError = UnavailableError("the director has not been reached yet")
        self.known = asyncio.Event()
        self._log = structlog.get_logger()

    def current(self) -> ServedModel:
        """The served model.

        Raises:
            UnavailableError: the director was never reached.
            IncompatiblePeerError: the deployment uses another tokenizer.
        """
        if self._model is None:
            raise type(self._why_not)(str(self._why_not))
        return self._model

    async def refresh(self) -> None:
        """Asks once. Without an answer the last known model stays; a deployment with another tokenizer removes it."""
        try:
            deployment = await self._describe()
            model = ServedModel.from_deployment(deployment, self._name, self._tokenizer_fingerprint)
        except IncompatiblePeerError as error:
            self._log.error("deployment refused", error=str(error))
            self._model, self._why_not = None, error
            return
        except PacelineError as error:
            self._log.debug("director does not answer", error=str(error))
            if not isinstance(self._why_not, IncompatiblePeerError):
                self._why_not = UnavailableError(f"the director does not answer: {error}")
            return
        if model != self._model:
            self._log.info(
                "served model",
                model=model.name,
                placement=model.placement,
                method=model.method,
                max_positions=model.max_positions,
            )
        self._model = model
        self.known.set()

    async def run(self) -> None:
        """Refreshes until cancelled: in short intervals until the model is known, then every `refresh_s`."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._refresh_s if self._model is not None else min(0.2, self._refresh_s))
