"""The files of a model directory that make a tokenizer, for those who write a model that has another one's."""

from __future__ import annotations

from pathlib import Path

from paceline.atomic_write import copy_file

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Those that a directory may have; the first decides what its ids mean."""


def copy_tokenizer(source: Path, output: Path) -> None:
    """Copy a directory's tokenizer, as far as it has one; `output` exists."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            copy_file(source / name, output / name)
