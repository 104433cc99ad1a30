"""The token the target chooses at a row, in the modes where drafts have no say in it.

Responsible for: greedy choice, and Gumbel-max choice with noise keyed by seed and position.

Deliberately does not know: drafts, trees, sequences. That is why these modes give one text whatever was
drafted.

Called by: `batch` for the target's rows; drafters, on their own logits, to draft the token the target is
likeliest to choose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.sampling.noise import NoiseRole, gumbel, gumbel_at
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.processors import RowParams, process_logits

_MODES_WITH_CHOICES = frozenset({VerifyMode.GREEDY, VerifyMode.COUPLED})
_SPARSE_FRACTION = 16  # below vocab / 16 tokens left, noise for those alone is cheaper than for all


def target_choices(logits: Tensor, positions: Sequence[int] | Tensor, rows: RowParams) -> Tensor:
    """One token per row: the largest logit, or the winner of a Gumbel race.

    Coupled mode is Gumbel-max sampling with shared noise (Daliri, Musco and Suresh, arXiv 2408.07978, section
    4): the choice has exactly the processed distribution, and depends on nothing but logits, parameters and
    position.

    Args:
        logits: [rows, vocab] float32
        positions: [rows] absolute position of the token that the row chooses: the row's own position plus
            one.
        rows: parameters per row; modes greedy and coupled only.

    Returns:
        [rows] int64
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits but parameters for {len(rows)}")
    if rows.all_greedy:
        return largest(logits)
    for mode in rows.modes:
        if mode not in _MODES_WITH_CHOICES:
            raise ValueError(f"a row in {mode} mode has no choice of its own; `verify_step` decides it")
    position = torch.as_tensor(positions, dtype=torch.int64, device=logits.device)
    choices = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    # Three groups by each row's own parameters, so that a row never takes another path because of its
    # neighbours.
    groups: dict[str, list[int]] = {"greedy": [], "filtered": [], "whole": []}
    for index, param in enumerate(rows.params):
        groups["greedy" if param.is_greedy else "filtered" if _is_filtered(param) else "whole"].append(index)
    for name, members in groups.items():
        if not members:
            continue
        chosen = torch.tensor(members, device=logits.device)
        part = rows.select(members)
        if name == "greedy":
            choices[chosen] = largest(logits[chosen])
            continue
        processed = process_logits(logits[chosen], part)
        race = _race_filtered if name == "filtered" else _race_whole
        choices[chosen] = race(processed, position[chosen], part.seeds)
    return choices


def largest(rows: Tensor) -> Tensor:
    """Index of each row's largest entry, the first of equals: `[rows, n] -> [rows]` int64.

    On a CPU through numpy, which looks at sixteen entries at a time: 6 rows of 49,152 take 22 us, in torch 244 us.
    """
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return rows.argmax(dim=-1)
    return torch.from_numpy(np.argmax(rows.numpy(), axis=-1))


def _race_whole(processed: Tensor, positions: Tensor, seeds: Tensor) -> Tensor:
    """[rows] int64: argmax of processed logit plus Gumbel noise over the whole vocabulary."""
    noise = gumbel(seeds, positions, NoiseRole.TARGET, processed.shape[1])
    return largest(noise.add_(processed))


def _race_filtered(processed: Tensor, positions: Tensor, seeds: Tensor) -> Tensor:
    """The same race where few tokens are left; ids in rising order, so that ties end as in `_race_whole`."""
    largest_count = max(1, int(processed.isfinite().sum(dim=-1).max()))
    if largest_count > processed.shape[1] // _SPARSE_FRACTION:
        return _race_whole(processed, positions, seeds)
    token_ids = processed.topk(largest_count, dim=-1).indices.sort(dim=-1).values  # [rows, largest_count]
    noise = gumbel_at(seeds, positions, NoiseRole.TARGET, token_ids)
    winners = noise.add_(processed.gather(1, token_ids)).argmax(dim=-1, keepdim=True)
    return token_ids.gather(1, winners).squeeze(1)


def _is_filtered(param: SamplingParams) -> bool:
    return param.top_k > 0 or param.top_p < 1 or param.min_p > 0
