"""The public formats: the layouts that methods name, and which of them a directory has.

Called by `exchange.py`. It names no layout and no method.
"""

from __future__ import annotations

from pathlib import Path

from paceline.methods.checkpoint import CheckpointError
from paceline.methods.layouts.layout import Layout
from paceline.methods.layouts.tensor_files import read_public_config
from paceline.methods.method import load_reference
from paceline.methods.registry import METHODS


def public_formats() -> dict[str, Layout]:
    """Layouts of all methods by name; the first that recognises a directory reads it."""
    references = {
        name: reference for method in METHODS.values() for name, reference in method.layouts.items()
    }
    layouts: list[Layout] = [load_reference(reference) for reference in references.values()]
    return {
        layout.name: layout for layout in sorted(layouts, key=lambda layout: (layout.precedence, layout.name))
    }


def format_named(name: str) -> Layout:
    """A layout by its name.

    Raises:
        CheckpointError: there is no layout with this name.
    """
    formats = public_formats()
    if name not in formats:
        raise CheckpointError(f"format {name!r} is none of {', '.join(sorted(formats))}")
    return formats[name]


def find_format(directory: Path) -> Layout:
    """The layout of a directory.

    Raises:
        CheckpointError: there is no configuration, or no layout recognises it.
    """
    content = read_public_config(directory)
    if "format_version" in content and "method" in content:
        raise CheckpointError(f"{directory.name!r} is a checkpoint of Paceline's own: serve it as it is")
    formats = public_formats()
    for layout in formats.values():
        if layout.recognises(content):
            return layout
    named = (
        content.get("architectures") or content.get("model_type") or "neither architectures nor model_type"
    )
    raise CheckpointError(
        f"{directory.name!r}: no format recognises its config.json, which names {named}; known are "
        f"{', '.join(sorted(formats))}: name one with --format"
    )
