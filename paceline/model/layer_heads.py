"""Key heads of each layer, from a transformers configuration: in some models layers differ.

Called by the generic executor, and by converters of drafters that read keys and values.
"""

from __future__ import annotations

from typing import Any


def layer_heads(config: Any) -> tuple[tuple[int, int], ...]:
    """Key heads and their width, layer by layer.

    Args:
        config: of a decoder, not of a larger model around it.
    """
    heads = config.num_attention_heads
    own = getattr(config, "per_layer_config", None)
    layers = (
        [config] * config.num_hidden_layers
        if own is None
        else [own[i] for i in range(config.num_hidden_layers)]
    )
    return tuple(
        (
            int(getattr(layer, "num_key_value_heads", None) or heads),
            int(getattr(layer, "head_dim", None) or config.hidden_size // heads),
        )
        for layer in layers
    )


def last_own_layers(config: Any) -> dict[str, int]:
    """The last layer of each type that computes keys and values of its own, by type in order of its name.

    Args:
        config: as in :func:`layer_heads`; a decoder that names no types has full layers alone.
    """
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    own = types[: config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)]
    return {kind: len(own) - 1 - own[::-1].index(kind) for kind in sorted(set(own))}
