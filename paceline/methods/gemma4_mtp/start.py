"""Where Gemma 4's assistant starts for a finished target: as a linear map from a step's input to the next state.

The head is the target's own, in as many dimensions as the assistant has, chosen so that logits lose least over the
states of the text. `pre_projection` is the ridge regression to the next state in these dimensions, and
`post_projection` leads back. Layers add little at first. Called by the method's `recipe.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.methods.gemma4_mtp.model import FULL, SLIDING, Gemma4MtpShape
from paceline.methods.gemma4_mtp.objective import TABLE, TargetTables
from paceline.model.layer_heads import last_own_layers, layer_heads
from paceline.target import CachedLayer
from paceline.training.data import Batch, Corpus, take_rows
from paceline.training.start import RIDGE, answer_transitions, random_parameters, solve_ridge

_BRANCH_WEIGHT = 0.05  # of the norms after attention and MLP


def default_shape(
    config: Any, num_layers: int, hidden: int, intermediate: int
) -> tuple[Gemma4MtpShape, dict[str, CachedLayer]]:
    """Sizes of an assistant for a target, and the target's layers that it reads.

    As published, sliding layers and a last full one; only full layers where the target has no sliding ones.

    Args:
        config: the target's transformers configuration.
        num_layers: layers of the assistant.
        hidden: width of the assistant.
        intermediate: width of its MLP.

    Raises:
        TrainingDataError: the target has no full layer with keys and values of its own, or its rotary positions depend
            on more than a base and a fraction of the head.
    """
    layers = last_own_layers(config)
    if FULL not in layers:
        raise TrainingDataError("the target has no full layer with keys and values of its own")
    kinds = (SLIDING,) * (num_layers - 1) + (FULL,) if SLIDING in layers else (FULL,) * num_layers
    heads, window = layer_heads(config), int(getattr(config, "sliding_window", None) or 1)
    used = sorted(set(kinds))
    ropes = {kind: _rope(config, kind) for kind in used}
    shape = Gemma4MtpShape(
        backbone=int(config.hidden_size),
        hidden=hidden,
        intermediate=intermediate,
        vocab=int(config.vocab_size),
        num_heads=int(config.num_attention_heads),
        layer_types=kinds,
        head_dims={kind: heads[layers[kind]][1] for kind in used},
        # A window counts the row itself; the assistant's rows have no keys of their own.
        sliding_window=max(window - 1, 1),
        rope_thetas={kind: theta for kind, (theta, _) in ropes.items()},
        rotary_fractions={kind: share for kind, (_, share) in ropes.items()},
        rms_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
    )
    cached = {
        kind: CachedLayer(
            layers[kind], *heads[layers[kind]], shape.sliding_window + 1 if kind == SLIDING else 0
        )
        for kind in used
    }
    return shape, cached


def _rope(config: Any, kind: str) -> tuple[float, float]:
    parameters: Mapping[str, Any] = config.rope_parameters
    own = parameters if "rope_type" in parameters else parameters[kind]
    if own["rope_type"] not in ("default", "proportional") or float(own.get("factor") or 1.0) != 1.0:
        raise TrainingDataError(f"rope_type {own['rope_type']!r} of the target is not supported")
    return float(own["rope_theta"]), float(own.get("partial_rotary_factor") or 1.0)


def starting_parameters(
    shape: Gemma4MtpShape, tables: TargetTables, corpus: Corpus, max_tokens: int, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters of the fitted map, and the root mean square of each of its inputs, ``[2 * backbone]``.

    Args:
        shape: sizes, with a dense head.
        tables: the target's.
        corpus: text.
        max_tokens: answer tokens to read.
        seed: of the random matrices.
    """
    parameters = random_parameters(shape.parameter_shapes(), seed)
    tokens, before, after = take_rows(corpus, lambda batch: _samples(batch, shape, tables), max_tokens)
    into, back = _main_directions(tables.head.float(), after, shape.hidden)
    wanted = after @ into.T
    level = float(wanted.square().mean().sqrt())
    inputs = torch.cat([tables.embedding[tokens].float() * tables.embedding_scale, before], dim=-1)
    gram = (inputs.T @ inputs).double()
    penalty = RIDGE * float(gram.diagonal().mean())
    parameters["pre_projection.weight"] = solve_ridge(gram, inputs.T @ (wanted / level), penalty)
    # The head reads states near one, not as large as the target's. With entries of some hundreds, an optimiser's equal
    # steps for all entries would change logits by many nats.
    parameters["post_projection.weight"] = level * back
    parameters[TABLE] = tables.head.float() @ parameters["post_projection.weight"]
    for name, tensor in parameters.items():
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            tensor.fill_(_BRANCH_WEIGHT)
        elif name.endswith("q_norm.weight"):
            tensor.fill_(tensor.shape[0] ** -0.5)  # attention's scale is 1
    return parameters, inputs.square().mean(0).sqrt().clamp_min(1e-6)


def _main_directions(head: Tensor, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Maps of states into ``count`` numbers, and back, for which ``head @ back @ into @ state`` loses least.

    Returns:
        ``[count, width]`` and ``[width, count]``.
    """
    gram = (head.T @ head).double()
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp_min(float(values.max()) * 1e-9)
    root = vectors @ (values.sqrt()[:, None] * vectors.T)
    inverse = vectors @ (values.rsqrt()[:, None] * vectors.T)
    second = (states.T @ states).double() / max(len(states), 1)
    main = torch.linalg.eigh(root @ second @ root).eigenvectors[:, -count:]
    return (main.T @ root).float(), (inverse @ main).float()


def _samples(batch: Batch, shape: Gemma4MtpShape, tables: TargetTables) -> tuple[Tensor, Tensor, Tensor]:
    states = tables.rows.read(batch)[..., : shape.backbone]
    return answer_transitions(batch, states, states)
