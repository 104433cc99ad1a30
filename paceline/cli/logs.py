"""Log lines of commands that work in this process.

Responsible for: writing them to standard error, for people, so that standard output contains results alone.
Deliberately does not know: what is logged. Called by commands that call the library directly.
"""

from __future__ import annotations

import logging
import sys

import structlog


def configure_cli_logs() -> None:
    """Sets up structlog for a command."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
