"""Whether a constraint can be enforced, decided in a child process.

Responsible for: the child process that tries grammars (started on first use, replaced when a grammar killed
it), and remembering verdicts. Deliberately does not know: llguidance, sequences, requests.

Called by: gateway and verifier, on a thread of their own; a verdict may take seconds.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.contract.errors import UnavailableError
from paceline.grammar.cache import ConstraintCache
from paceline.grammar.refusal import ConstraintError
from paceline.sampling.params import Constraint

# Wall-clock limits. The child limits its own processor time, so that a busy machine rejects no sound grammar.
_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 20.0

_DEATHS = {
    signal.SIGPROF: "is too complex: it takes more processor time than a grammar may",
    signal.SIGSEGV: "is too complex: it is nested too deeply",
    signal.SIGABRT: "is too complex: it takes more memory or stack than a grammar may",
    signal.SIGILL: "is too complex: it takes more memory or stack than a grammar may",
    signal.SIGBUS: "is too complex: it is nested too deeply",
}


@dataclass(frozen=True, slots=True)
class _Verdict:
    refusal: str | None


class _ModelError(Exception):
    """Grammars cannot be used with the model's tokenizer."""


class GrammarChecker:
    """Verdicts on constraints for one tokenizer; safe to call from several threads.

    Args:
        model_dir: directory of its tokenizer.json.
        vocab_size: columns of its logits.
        end_token_ids: its end tokens.
    """

    def __init__(self, model_dir: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._model = {
            "model_dir": str(model_dir),
            "vocab_size": vocab_size,
            "end_token_ids": list(end_token_ids),
        }
        self._verdicts: ConstraintCache[_Verdict] = ConstraintCache()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def check(self, constraint: Constraint) -> None:
        """Check whether a constraint can be enforced.

        Raises:
            ConstraintError: it cannot.
            UnavailableError: the child process cannot be started, or does not answer.
        """
        with self._lock:
            verdict = self._verdicts.get(constraint)
            if verdict is None:
                verdict = self._try(constraint)
                self._verdicts.put(constraint, verdict)
        if verdict.refusal is not None:
            raise ConstraintError(constraint.kind, verdict.refusal)

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._end_child()

    def _try(self, constraint: Constraint) -> _Verdict:
        try:
            child = self._running_child()
        except _ModelError as error:
            return _Verdict(f"is not possible with this model: {error}")
        asked = {"kind": constraint.kind.value, "text": constraint.text, "choices": list(constraint.choices)}
        try:
            answer = self._ask(child, asked, _ANSWER_TIMEOUT_S)
        except TimeoutError:
            self._end_child()
            raise UnavailableError("the check of the grammar did not end in time") from None
        if answer is not None:
            return _Verdict(answer["refusal"])
        code = child.wait()
        self._end_child()
        death = _DEATHS.get(-code) if code < 0 else None  # type: ignore[call-overload]
        if death is None:
            raise UnavailableError(f"the check of the grammar ended with status {code}")
        return _Verdict(death)

    def _running_child(self) -> subprocess.Popen[str]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end_child()
        if find_spec("llguidance") is None:
            raise UnavailableError("grammars cannot be checked here: the package llguidance is missing")
        self._child = subprocess.Popen(
            [sys.executable, "-m", "paceline.grammar.check_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        try:
            answer = self._ask(self._child, self._model, _START_TIMEOUT_S)
        except TimeoutError:
            answer = None
        if answer is not None and "failure" not in answer:
            return self._child
        self._end_child()
        if answer is not None:
            raise _ModelError(answer["failure"])
        raise UnavailableError("grammars cannot be checked here: the process that does it did not start")

    @staticmethod
    def _ask(child: subprocess.Popen[str], asked: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Send one line and read one line; None if the child died."""
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(asked) + "\n")
            child.stdin.flush()
        except OSError:
            return None
        deadline_s = time.monotonic() + timeout_s
        while not select.select([child.stdout], [], [], 0.5)[0]:
            if time.monotonic() > deadline_s:
                raise TimeoutError
        line = child.stdout.readline()
        answer: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return answer

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # closing flushes, and the reader has ended
                    pipe.close()
