"""From a request's constraint to the rule of its sequence.

Responsible for: compiling outside the event loop and the step loop, one grammar at a time, and a cache of the compiled
grammars. Deliberately does not know: frames, sequences of the loop, what a rule does in a step. Called by the servicer
before it hands a sequence to the step loop.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.contract.errors import InvalidRequestError, UnavailableError
from paceline.grammar.cache import ConstraintCache
from paceline.grammar.checker import GrammarChecker
from paceline.grammar.compiler import CompiledGrammar, GrammarCompiler
from paceline.grammar.refusal import ConstraintError
from paceline.grammar.rule import GrammarRule
from paceline.sampling.rules import LogitRule, RuleError
from services.verifier.specs import SequenceSpec

MAX_WAITING = 1024
"""Openings that may wait for their grammar."""


class RequestGrammars:
    """Compiles constraints for one target.

    Args:
        model_dir: where the target's tokenizer.json is; read when the first constraint comes.
        vocab_size: columns of its logits.
        end_token_ids: its end tokens.
    """

    def __init__(self, model_dir: Path, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._checker = GrammarChecker(model_dir, vocab_size, end_token_ids)
        self._compiler: GrammarCompiler | None = None
        self._compiled: ConstraintCache[CompiledGrammar] = ConstraintCache()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._num_waiting = 0

    async def rule(self, spec: SequenceSpec) -> LogitRule:
        """The rule of a sequence with a constraint, advanced over its resumed tokens.

        Raises:
            InvalidRequestError: the constraint cannot be honoured; names its field.
            UnavailableError: constraints cannot be checked here, or too many openings wait.
        """
        missing = set(self._end_token_ids) - spec.stop_token_ids
        if missing:
            raise InvalidRequestError(
                "stop_token_ids", f"must hold the end tokens {sorted(missing)} where there is a constraint"
            )
        if self._num_waiting >= MAX_WAITING:
            raise UnavailableError(f"{self._num_waiting} constraints wait to be compiled")
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._make, spec)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """End the thread and the child process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._checker.close()

    def _make(self, spec: SequenceSpec) -> LogitRule:
        constraint = spec.sampling.constraint
        assert constraint is not None
        resumed = spec.prompt[len(spec.prompt) - spec.num_resumed_tokens :]
        try:
            grammar = self._compiled.get(constraint)
            if grammar is None:
                self._checker.check(constraint)
                grammar = self._loaded_compiler().compile(constraint)
                self._compiled.put(constraint, grammar)
            return GrammarRule(grammar, spec.stop_token_ids, resumed)
        except (ConstraintError, RuleError) as error:
            raise error.inside("sampling") from None

    def _loaded_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler.load(self._model_dir, self._vocab_size, self._end_token_ids)
        return self._compiler
