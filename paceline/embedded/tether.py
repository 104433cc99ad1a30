"""First program of every child process: tie it to its parent, then become the real program.

Responsible for: asking the kernel to end the child when its parent dies, however that happens. It runs as a file, with
nothing imported but the standard library, because code between fork and exec in a process with threads is not safe.
Deliberately does not know: what it becomes. Called by: :mod:`paceline.embedded.process`.

Usage: tether.py PARENT_PID SIGNAL PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent and replaces it by the program."""
    parent, number, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":  # elsewhere a killed parent leaves its children; a stopped one never does
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before the line above
            sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
