"""A child process that compiles grammars first, so that a bad one cannot kill a server.

Responsible for: doing what a server would do (compile, then mask and advance a few times) under limits of
processor time, memory and stack. A grammar that exceeds a limit kills the process, and the parent interprets
the signal.

Reads one JSON object per line on standard input, and answers each with one line: {"refusal": null or text}.
Ends with its input. Started by `checker` as ``python -m paceline.grammar.check_process``; the first line names the
tokenizer.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from paceline.grammar.compiler import GrammarCompiler, is_dead_end
from paceline.grammar.refusal import ConstraintError
from paceline.sampling.params import Constraint, ConstraintKind

MAX_CPU_S = 1.0
"""Processor time for one grammar; a common schema takes a few milliseconds."""
MAX_MEMORY_BYTES = 384 << 20
"""Address space beyond that of the tokenizer."""
STACK_BYTES = 1 << 20
"""Less than any thread of a server has, so that a grammar that passes here fits there."""
NUM_TOKENS = 16
"""Tokens of the random text that is tried, each with its mask."""


def try_grammar(compiler: GrammarCompiler, constraint: Constraint) -> str | None:
    """Why a constraint is rejected; None if it is accepted."""
    try:
        grammar = compiler.compile(constraint)
    except ConstraintError as error:
        return error.description
    matcher, chance = grammar.start(), random.Random(0)
    for _ in range(NUM_TOKENS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return None if is_dead_end(matcher) else f"is too complex: {matcher.get_error()}"
        allowed = [
            8 * index + bit for index, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1
        ]
        texts = [token for token in allowed if token not in grammar.end_token_ids]
        if not texts:
            break
        matcher.consume_token(chance.choice(texts))
    return None


def _serve(compiler: GrammarCompiler) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        constraint = Constraint(ConstraintKind(asked["kind"]), asked["text"], tuple(asked["choices"]))
        # The default action of the timer's signal ends the process, whatever code it runs.
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        refusal = try_grammar(compiler, constraint)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer({"refusal": refusal})


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read the tokenizer's line, then grammars, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's; the parent ends this process by its input
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    model = json.loads(sys.stdin.readline())
    try:
        compiler = GrammarCompiler.load(Path(model["model_dir"]), model["vocab_size"], model["end_token_ids"])
    except (OSError, ValueError) as error:
        _answer({"failure": str(error)})
        return
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _answer({})
    threading.stack_size(STACK_BYTES)
    server = threading.Thread(target=_serve, args=(compiler,))
    server.start()
    server.join()


if __name__ == "__main__":
    main()
