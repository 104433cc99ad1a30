"""The files of a model directory that make a tokenizer, for code that writes a model with another model's
tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from paceline.atomic_write import copy_file

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Files that a directory may have; the first one determines the ids."""


def copy_tokenizer(source: Path, output: Path) -> None:
    """Copy a directory's tokenizer files, as far as they exist; `output` must exist."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            copy_file(source / name, output / name)
