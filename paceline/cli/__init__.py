"""The ``paceline`` command.

Responsible for: errors and exit codes of all commands. Deliberately does not know: any command.
:mod:`paceline.cli.app` finds commands and imports each when it is called, so that ``paceline --help`` needs no
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits."""
    from paceline.cli.app import app
    from paceline.contract.errors import InvalidRequestError, PacelineError

    try:
        app(args=None if argv is None else list(argv), prog_name="paceline")
    except PacelineError as error:
        sys.stderr.write(f"paceline: {error}\n")
        sys.exit(2 if isinstance(error, InvalidRequestError) else 1)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"paceline: {error}; `paceline doctor` lists what is missing and how to get it\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has ended
        sys.exit(141)
