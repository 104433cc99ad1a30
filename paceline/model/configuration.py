"""The configuration of a model directory.

`config.json` is read directly where it states everything that our executors read. Otherwise transformers reads it: it
knows the defaults and older spellings of every family. This file does not know which executor runs the model.

Reading directly saves time: transformers' configuration classes import its models' activations, which import torch's
distributed tensors and sympy. That takes 3.4 s of a start that takes 8 s.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The value or the type that each key must have. Where all hold, transformers' Llama configuration has the same
# attributes, and its default rope needs nothing else.
_STATED: dict[str, type | str] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "vocab_size": int,
    "max_position_embeddings": int,
    "rms_norm_eps": float,
    "tie_word_embeddings": bool,
    "rope_parameters": dict,
}
# Keys that transformers also writes and no executor of the family reads: biases are found by their tensors.
_UNREAD = frozenset(
    {
        *(
            "architectures",
            "dtype",
            "transformers_version",
            "use_cache",
            "pretraining_tp",
            "initializer_range",
        ),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"),
        *("attention_bias", "attention_dropout", "mlp_bias"),
    }
)


def read_configuration(model_dir: Path) -> Any:
    """A configuration with transformers' attributes, for every executor."""
    return stated_configuration(model_dir) or transformers_configuration(model_dir)


def stated_configuration(model_dir: Path) -> SimpleNamespace | None:
    """The configuration as it is written, or None where defaults or other spellings may matter."""
    content = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not content.keys() <= _STATED.keys() | _UNREAD:
        return None
    for key, wanted in _STATED.items():
        value = content.get(key)
        if value != wanted if isinstance(wanted, str) else type(value) is not wanted:
            return None
    rope = content["rope_parameters"]
    if rope.keys() != {"rope_type", "rope_theta"} or rope["rope_type"] != "default":
        return None
    return SimpleNamespace(**content)


def transformers_configuration(model_dir: Path) -> Any:
    """The configuration that transformers makes of it."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
