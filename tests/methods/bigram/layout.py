"""A public layout of bigrams: both tables one above the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.layouts.layout import Checkpoint, Layout
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import (
    check_names,
    write_tensors,
)
from tests.methods.bigram.drafter import LAST, NEXT, parameter_shapes


def _recognises(content: Mapping[str, Any]) -> bool:
    return "bigram_rank" in content


def _read(checkpoint: PublicCheckpoint, target: TargetFacts) -> Checkpoint:
    tensors = checkpoint.tensors()
    shape = {
        "rank": checkpoint.config.size("bigram_rank"),
        "target_vocab": target.vocab,
        "max_positions": target.max_positions,
    }
    config = DrafterConfig("bigram", target.fingerprint, target.name, shape)
    last, following = tensors["tables"].chunk(2)
    own = {LAST: last.contiguous(), NEXT: following.contiguous()}
    check_names(own, parameter_shapes(config))
    return config, own


def _write(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    content = {"bigram_rank": config.size("rank")}
    tables = {"tables": torch.cat([tensors[LAST], tensors[NEXT]])}
    write_tensors(directory, "model.safetensors", content, tables)


BIGRAM_TABLES = Layout("bigram_tables", _recognises, _read, _write)
