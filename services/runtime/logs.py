"""Structured logs of a process: one line per event on standard error, JSON or text.

Responsible for: configuring structlog, and sending the standard library's loggers (grpc, asyncio, ray) through
the same renderer. Deliberately does not know: what is logged. Called by services.runtime.lifecycle and other
entry points.
"""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs(role: str, *, level: str, as_json: bool) -> None:
    """Configure structlog and logging for this process; every line names the role."""
    sink = sys.stderr
    severity = logging.getLevelNamesMapping()[level.upper()]

    def add_role(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event.setdefault("role", role)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        add_role,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(default=str)
        if as_json
        else structlog.dev.ConsoleRenderer(
            colors=sink.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[*[p for p in shared if not isinstance(p, structlog.stdlib.ExtraAdder)], renderer],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.PrintLoggerFactory(sink),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(severity, logging.INFO))
