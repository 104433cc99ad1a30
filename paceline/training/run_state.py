"""A training run on disk, complete enough to continue as if it had never stopped.

One folder per step: weights and optimiser state as safetensors; counters, data position and random state as JSON. A
folder appears whole or not at all. Called by the loop; knows no method.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.contract.errors import TrainingDataError

_KEEP = 2


@dataclass(frozen=True, slots=True)
class RunState:
    """A run at one step: ``constants`` were fixed when the run began, ``meta`` is the JSON part."""

    weights: dict[str, Tensor]
    constants: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    meta: dict[str, Any]


def flatten_optimizer(
    optimizers: list[torch.optim.Optimizer], parameters: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Optimiser state as ``parameter name / entry`` tensors."""
    flat: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for optimizer in optimizers:
            for entry, value in optimizer.state.get(parameter, {}).items():
                flat[f"{name}/{entry}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return {k: v.detach().clone().contiguous() for k, v in flat.items()}


def restore_optimizer(
    optimizers: list[torch.optim.Optimizer], parameters: dict[str, nn.Parameter], flat: dict[str, Tensor]
) -> None:
    """Restores what :func:`flatten_optimizer` gave."""
    owner = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    for key, value in flat.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None:
            raise TrainingDataError(f"optimiser state for an unknown parameter {name!r}")
        owner[id(parameter)].state[parameter][entry] = value.clone()


def save_run(folder: Path, step: int, state: RunState) -> Path:
    """Writes ``folder/step-NNNNNN`` and removes all but the newest folders."""
    final = folder / f"step-{step:06d}"
    partial = folder / f".partial-{step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(state.weights, partial / "weights.safetensors")
    save_file(state.constants, partial / "constants.safetensors")
    save_file(state.optimizer, partial / "optimizer.safetensors")
    random_state = torch.get_rng_state().numpy().tobytes().hex()
    (partial / "state.json").write_text(json.dumps({**state.meta, "step": step, "rng": random_state}) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    for old in sorted(folder.glob("step-*"))[:-_KEEP]:
        shutil.rmtree(old)
    return final


def load_newest_run(folder: Path) -> RunState | None:
    """The newest complete checkpoint, or None; restores torch's random state.

    Raises:
        TrainingDataError: a checkpoint exists and cannot be read.
    """
    found = sorted(folder.glob("step-*"))
    if not found:
        return None
    newest = found[-1]
    try:
        meta = json.loads((newest / "state.json").read_text())
        weights = load_file(newest / "weights.safetensors")
        constants = load_file(newest / "constants.safetensors")
        optimizer = load_file(newest / "optimizer.safetensors")
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(meta.pop("rng")), dtype=torch.uint8))
    except (OSError, ValueError, KeyError) as error:
        raise TrainingDataError(f"{newest}: {error}") from error
    return RunState(weights, constants, optimizer, meta)
