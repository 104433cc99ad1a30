"""Writes a pretrained model as transformers saves it, and its prediction modules as a drafter for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.atomic_write import copy_file, write_json
from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.deepseek_mtp.joint import JointPretraining
from paceline.models import copy_tokenizer, model_fingerprint
from paceline.safetensors_io import write_weights

_GENERATION = "generation_config.json"  # names the tokens that end a text


def write_pair(folder: Path, joint: JointPretraining, tokenizer_dir: Path, facts: Mapping[str, Any]) -> None:
    """Write ``model`` and ``drafter`` below a folder.

    Args:
        folder: directory of both.
        joint: the model and its modules.
        tokenizer_dir: a model directory with the tokenizer of the text.
        facts: how they were trained, for the drafter's configuration.
    """
    model, target = folder / "model", joint.target
    write_weights(model / "model.safetensors", joint.model_tensors())
    tokenizer_config = json.loads((tokenizer_dir / "config.json").read_text())
    ends = {name: tokenizer_config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target.vocab,
        "hidden_size": target.hidden,
        "intermediate_size": target.intermediate,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": target.rope_theta},
        "max_position_embeddings": target.max_positions,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **ends,
    }
    copy_tokenizer(tokenizer_dir, model)
    if (tokenizer_dir / _GENERATION).is_file():
        copy_file(tokenizer_dir / _GENERATION, model / _GENERATION)
    write_json(model / "config.json", content)
    shape = {**joint.shape.fields(), "max_positions": target.max_positions}
    config = DrafterConfig("deepseek_mtp", model_fingerprint(model), "model", shape, facts)
    save_drafter(folder / "drafter", config, joint.module_tensors())
