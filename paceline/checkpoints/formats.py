"""The table of public formats: how each is recognised, read and written.

Responsible for: names, and finding the format of a directory by what its `config.json` says. A new format is a module
with a `read_NAME` and a `write_NAME`, and a line here. Called by `exchange.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoints.block_layouts import (
    count_target_layers,
    is_deepspec,
    is_dflash,
    read_deepspec,
    read_dflash,
    store_target_vocabulary,
    write_deepspec,
    write_dflash,
)
from paceline.checkpoints.eagle import is_eagle, read_eagle, write_eagle
from paceline.checkpoints.shared import store_embedding
from paceline.checkpoints.speculators import (
    is_speculators,
    read_speculators,
    store_target,
    write_speculators,
)
from paceline.checkpoints.target_facts import TargetFacts
from paceline.checkpoints.tensor_files import read_public_config
from paceline.checkpoints.vllm import is_vllm, read_vllm, store_target_head, write_vllm
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, read_all_tensors, save_drafter
from paceline.methods.deepseek_mtp.nextn import is_nextn, read_nextn, store_vocabulary, write_nextn
from paceline.methods.gemma4_mtp.assistant import (
    is_gemma4_assistant,
    read_gemma4_assistant,
    write_gemma4_assistant,
)
from paceline.methods.medusa_heads.layout import is_medusa, read_medusa, write_medusa
from paceline.methods.p_eagle.layout import is_p_eagle, read_p_eagle, write_p_eagle
from paceline.methods.pard1.checkpoint import save_pard
from paceline.methods.pard1.layout import (
    carry_tokenizer,
    is_pard,
    load_own,
    nothing_shared,
    read_pard,
    write_pard,
)


def _load_flat(directory: Path, config: DrafterConfig) -> tuple[DrafterConfig, dict[str, Tensor]]:
    return config, read_all_tensors(directory)


def _carry_nothing(source: Path, output: Path) -> None:
    """There is nothing beside the tensors."""


@dataclass(frozen=True, slots=True)
class Format:
    """A public layout of checkpoints.

    Attributes:
        name: on the command line.
        recognises: whether a `config.json` is of this format.
        read: from a public directory to Paceline's configuration and tensors.
        write: from Paceline's configuration and tensors to a public directory.
        load: from a directory of Paceline's own, whose configuration was read, to what `write` takes.
        save: from what `read` gives to a directory of Paceline's own.
        carry: copies what stands beside the tensors, from the directory that was read to the one written, either way.
        complete: adds what the drafter shares with its target, whose directory is the last argument; those who load
            the format elsewhere may want it there.
    """

    name: str
    recognises: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Path, TargetFacts], tuple[DrafterConfig, dict[str, Tensor]]]
    write: Callable[[Path, DrafterConfig, Mapping[str, Tensor]], None]
    complete: Callable[[DrafterConfig, Mapping[str, Tensor], Path], tuple[DrafterConfig, dict[str, Tensor]]]
    load: Callable[[Path, DrafterConfig], tuple[DrafterConfig, dict[str, Tensor]]] = _load_flat
    save: Callable[[Path, DrafterConfig, Mapping[str, Tensor]], None] = save_drafter
    carry: Callable[[Path, Path], None] = _carry_nothing


FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        Format("dflash", is_dflash, read_dflash, write_dflash, count_target_layers),
        Format("deepspec", is_deepspec, read_deepspec, write_deepspec, store_target_vocabulary),
        Format("speculators", is_speculators, read_speculators, write_speculators, store_target),
        Format("nextn", is_nextn, read_nextn, write_nextn, store_vocabulary),
        # Before PARD's, whose token it may name too, and EAGLE's, which is told by one layer and no other mark.
        Format("p_eagle", is_p_eagle, read_p_eagle, write_p_eagle, nothing_shared),
        Format(
            "pard",
            is_pard,
            read_pard,
            write_pard,
            nothing_shared,
            load_own,
            save_pard,
            carry_tokenizer,
        ),
        Format("eagle", is_eagle, read_eagle, write_eagle, store_embedding),
        Format(
            "gemma4_assistant",
            is_gemma4_assistant,
            read_gemma4_assistant,
            write_gemma4_assistant,
            nothing_shared,
        ),
        Format("medusa", is_medusa, read_medusa, write_medusa, store_target_head),
        Format("vllm", is_vllm, read_vllm, write_vllm, store_target_head),
    )
}
"""By name; the first that recognises a directory reads it."""


def format_named(name: str) -> Format:
    """A format by its name.

    Raises:
        CheckpointError: there is none of this name.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise CheckpointError(f"format {name!r} is none of {', '.join(sorted(FORMATS))}") from None


def find_format(directory: Path) -> Format:
    """The format of a directory.

    Raises:
        CheckpointError: no configuration, or one that no format recognises.
    """
    content = read_public_config(directory)
    if "format_version" in content and "method" in content:
        raise CheckpointError(f"{directory.name!r} is a checkpoint of Paceline's own: serve it as it is")
    for entry in FORMATS.values():
        if entry.recognises(content):
            return entry
    said = content.get("architectures") or content.get("model_type") or "neither architectures nor model_type"
    raise CheckpointError(
        f"{directory.name!r}: no format recognises its config.json, which names {said}; known are "
        f"{', '.join(sorted(FORMATS))}: name one with --format"
    )
