"""What a model directory says of its architecture.

Responsible for reading `config.json`: as it stands where it states all that the Llama family's executors ask for, else
through transformers, which knows the defaults and older spellings of every family. Deliberately does not know: which
executor runs the model. Called by the engine.

The reason for the first way is time: transformers' configuration classes import its models' activations, and those
torch's distributed tensors and sympy, for 3.4 s of a start that takes 8.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The value each key must have, or the type: where all of it holds, a Llama configuration of transformers has the same
# attributes. Its default rope needs nothing else of a configuration.
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
# Keys that transformers writes beside them and no executor of the family reads: biases are found by their tensors.
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
    """A configuration with transformers' attributes, for executors of the Llama family as well as for any other."""
    return stated_configuration(model_dir) or transformers_configuration(model_dir)


def stated_configuration(model_dir: Path) -> SimpleNamespace | None:
    """The configuration as it is written, or None where a default or another spelling might have a part in it."""
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
