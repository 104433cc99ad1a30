"""Medusa heads that know some texts by heart, in closed form: real drafts that a target accepts, without training.

The output head of each head is the ridge regression from hidden states to the tokens that follow them, which a state of
`hidden` numbers can learn exactly for fewer positions than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.medusa_heads.heads import MedusaShape
from paceline.models import model_fingerprint
from paceline.target import SequenceRows, TapSpec, TargetEngine

_SHARPNESS = 40.0


def memorise(
    path: Path,
    target_dir: Path,
    texts: Sequence[Sequence[int]],
    starts: Sequence[int],
    num_heads: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a Medusa-1 checkpoint.

    Args:
        path: where to.
        target_dir: the target.
        texts: token ids, prompts included.
        starts: for each text the first token that is to be known.
        num_heads: heads.
        dtype: of the target.
    """
    engine = TargetEngine.load(target_dir, dtype=dtype, taps=[TapSpec(norm_final=True)])
    states, positions = [], []
    for tokens, start in zip(texts, starts, strict=True):
        slot = engine.open()
        (rows,) = engine.step([SequenceRows(slot, list(tokens), num_logits="none")]).features
        states.append(rows[start - 1 :].clone())  # the row before the first root, and all behind it
        positions += [(tokens, row) for row in range(start - 1, len(tokens))]
        engine.close(slot)
    inputs = torch.cat(states).double()  # [positions, hidden]
    known = sorted({token for tokens, start in zip(texts, starts, strict=True) for token in tokens[start:]})
    place = {token: index for index, token in enumerate(known)}
    shape = MedusaShape(
        hidden=inputs.shape[1],
        target_vocab=engine.shape.vocab_size,
        draft_vocab=len(known),
        num_heads=num_heads,
        has_bias=False,
    )
    gram = inputs.T @ inputs
    gram += torch.eye(gram.shape[0], dtype=torch.float64) * (1e-6 * float(gram.diagonal().mean()))
    tensors = {"token_map": torch.tensor(known)}
    for k in range(num_heads):
        labels = torch.zeros(len(inputs), len(known), dtype=torch.float64)
        for index, (tokens, row) in enumerate(positions):
            if row + 2 + k < len(tokens):
                labels[index, place[tokens[row + 2 + k]]] = _SHARPNESS
        tensors[f"lm_heads.{k}.weight"] = torch.linalg.solve(gram, inputs.T @ labels).T.float()
        tensors[f"blocks.{k}.layers.0.weight"] = torch.zeros(shape.hidden, shape.hidden)
    content = {**asdict(shape), "max_positions": engine.shape.max_positions}
    save_drafter(path, DrafterConfig("medusa1", model_fingerprint(target_dir), "memorised", content), tensors)
    return path
