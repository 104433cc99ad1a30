"""Where training of EAGLE-3 and P-EAGLE starts: sizes from the target, and weights that already predict.

Called by each method's recipe. Knows nothing of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.methods.eagle.fused_shape import Eagle3Shape
from paceline.training.data import Batch, Corpus, take_rows
from paceline.training.sizes import ModelSizes
from paceline.training.start import RIDGE, answer_transitions, random_parameters, solve_ridge

_FAST_PAIRS = 8  # rotary pairs that rotate fast enough to tell neighbours apart
_OWN_POSITION_NATS = 6.0  # approximate lead of a row's own position over the one before


def default_shape(
    target: ModelSizes, num_taps: int, draft_vocab: int, intermediate: int | None
) -> Eagle3Shape:
    """One layer of the target's own width."""
    sizes = {**target.drafter_sizes(), "intermediate": intermediate or target.intermediate}
    return Eagle3Shape(**sizes, target_hidden=target.hidden, num_taps=num_taps, draft_vocab=draft_vocab)


@dataclass(frozen=True, slots=True)
class Eagle3Start:
    """A linear look-ahead from a position's taps and the next token to the final hidden state of that token.

    Attributes:
        from_taps: float32 ``[hidden, taps_width]``, for taps divided by ``tap_scale``.
        from_embedding: float32 ``[hidden, hidden]``, for embeddings of unit root mean square.
        tap_scale: float32 ``[taps_width]``, root mean square of each entry.
        level: root mean square of the final hidden state; both matrices give outputs divided by it.
        constant_direction: float32 ``[2 * hidden]``. Its product with what attention reads at the start (normed
            embedding, then normed fused features) is as close to one everywhere as a linear map can be.
    """

    from_taps: Tensor
    from_embedding: Tensor
    tap_scale: Tensor
    level: float
    constant_direction: Tensor


def fit_linear(corpus: Corpus, embedding: Tensor, max_tokens: int) -> Eagle3Start:
    """Ridge regression over answers.

    Args:
        corpus: text with features.
        embedding: the target's ``[vocab, hidden]``.
        max_tokens: answer tokens to read.
    """
    tokens, taps, hidden = take_rows(corpus, _samples, max_tokens)
    seen = len(tokens)
    embedded = _unit(embedding[tokens].float())
    tap_scale = taps.square().mean(0).sqrt().clamp_min(1e-6)
    level = float(hidden.square().mean().sqrt())
    inputs = torch.cat([taps / tap_scale, embedded], dim=1)  # [seen, taps_width + hidden]
    # [hidden, taps_width + hidden]
    solution = solve_ridge(inputs.T @ inputs, inputs.T @ (hidden / level), RIDGE * seen)
    width = taps.shape[1]
    from_taps = solution[:, :width].contiguous()
    fused = _unit(inputs[:, :width] @ from_taps.T)
    read = torch.cat([embedded, fused], dim=1)
    moments = (read.T @ read / seen).double() + torch.eye(read.shape[1], dtype=torch.float64) * RIDGE
    direction = torch.linalg.solve(moments, read.mean(0).double()).float()
    direction /= (read @ direction).mean()
    return Eagle3Start(from_taps, solution[:, width:].contiguous(), tap_scale, level, direction)


def _samples(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return answer_transitions(batch, batch.need_taps(), batch.need_hidden())


def _unit(x: Tensor) -> Tensor:
    return x * x.square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()


def starting_parameters(
    shape: Eagle3Shape, start: Eagle3Start, target_head: Tensor, seed: int
) -> dict[str, Tensor]:
    """Parameters that begin as the fitted linear drafter.

    ``fc`` is the taps' part of the map, for taps divided by ``start.tap_scale``. The embedding's part has to pass
    through attention, the only place where the layer reads the token. So all but one query head of each key head begin
    by attending to their own position, and values and output carry the best matrix of their rank. An attention that
    begins even over the whole text would drown the token, and would first have to learn where to look.

    Args:
        shape: sizes; ``hidden`` must equal ``target_hidden``.
        start: from :func:`fit_linear`.
        target_head: the target's head rows of the draft vocabulary.
        seed: of the random matrices.
    """
    if shape.hidden != shape.target_hidden:
        raise TrainingDataError("a draft layer narrower than its target cannot start from the target's head")
    parameters = random_parameters(shape.parameter_shapes(), seed, branch_scale=0.1)
    _look_at_own_position(shape, parameters, start)
    parameters["fc.weight"] = start.from_taps
    # One scale for the whole stream. A scale for each entry made the head most sensitive where the target's stream is a
    # large constant, and made training slower.
    parameters["lm_head.weight"] = target_head.float() * start.level
    return parameters


def _look_at_own_position(shape: Eagle3Shape, parameters: dict[str, Tensor], start: Eagle3Start) -> None:
    groups, head_dim, half = shape.num_heads // shape.num_kv_heads, shape.head_dim, shape.head_dim // 2
    own = max(1, groups - 1)  # heads of a group that attend to their own position
    # A constant query and key, rotated by their positions, have the largest product at distance zero.
    num_pairs = min(_FAST_PAIRS, half)
    constant = torch.zeros(head_dim)
    constant[:num_pairs] = (_OWN_POSITION_NATS * head_dim**0.5 * 8 / num_pairs) ** 0.5
    toward_constant = torch.outer(constant, start.constant_direction)
    queries = parameters["midlayer.self_attn.q_proj.weight"].view(shape.num_kv_heads, groups, head_dim, -1)
    queries[:, :own] = toward_constant
    keys = parameters["midlayer.self_attn.k_proj.weight"].view(shape.num_kv_heads, head_dim, -1)
    keys.mul_(0.3).add_(toward_constant)
    # from_embedding ~ output @ values, with as many columns as there are value entries.
    rank = shape.num_kv_heads * head_dim
    u, s, v = torch.linalg.svd(start.from_embedding)
    rank = min(rank, s.numel())
    values = parameters["midlayer.self_attn.v_proj.weight"]  # [kv_heads * head_dim, target_hidden + hidden]
    values[:rank] = 0.0
    values[:rank, : shape.target_hidden] = s[:rank, None].sqrt() * v[:rank]
    padded = torch.zeros(shape.hidden, shape.num_kv_heads * head_dim)
    padded[:, :rank] = u[:, :rank] * s[:rank].sqrt() / own
    output = parameters["midlayer.self_attn.o_proj.weight"].view(
        shape.hidden, shape.num_kv_heads, groups, head_dim
    )
    output[:, :, :own] = padded.view(shape.hidden, shape.num_kv_heads, 1, head_dim)
