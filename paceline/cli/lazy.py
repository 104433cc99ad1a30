"""A group of commands that are imported when they are called.

Responsible for: listing commands without importing them, and finding commands that other packages add through
the entry-point group ``paceline.commands``. Deliberately does not know: any command. Used by
:mod:`paceline.cli.app`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

ENTRY_POINT_GROUP = "paceline.commands"


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command is defined: a function with typer's annotations, or a Typer application."""

    module: str
    attribute: str
    help: str

    def load(self, name: str) -> Any:
        """Imports the command."""
        target: typer.Typer | Callable[..., Any] = getattr(
            importlib.import_module(self.module), self.attribute
        )
        if not isinstance(target, typer.Typer):
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(name)(target)
            target = single
        command = get_command(target)
        command.name = name
        return command


class LazyGroup(TyperGroup):
    """A group over a table of lazy commands."""

    table: Mapping[str, LazyCommand] = {}
    takes_plug_ins = True
    _is_listing = False

    @functools.cached_property
    def _commands(self) -> dict[str, LazyCommand]:
        return {**(_plug_ins() if self.takes_plug_ins else {}), **self.table}

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in alphabetical order."""
        return sorted(self._commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command itself; while help is written, a stand-in with its first line."""
        lazy = self._commands.get(cmd_name)
        if lazy is None:
            return None
        if self._is_listing:
            return TyperCommand(cmd_name, callback=None, help=lazy.help)
        return lazy.load(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes help without importing any command."""
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False


def _plug_ins() -> dict[str, LazyCommand]:
    """Commands of other packages; the first line of their module's docstring is their help."""
    found = {}
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        module, _, attribute = entry_point.value.partition(":")
        found[entry_point.name] = LazyCommand(module, attribute, _first_line(entry_point, module))
    return found


def _first_line(entry_point: EntryPoint, module: str) -> str:
    fallback = f"From the package {entry_point.dist.name}." if entry_point.dist is not None else "A plug-in."
    try:
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        text = ast.get_docstring(ast.parse(source))
    except (ImportError, OSError, SyntaxError, ValueError):  # calling the command will report the error
        return fallback
    return text.splitlines()[0] if text else fallback
