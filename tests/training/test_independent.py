"""A cut model keeps the kinds of its layers, however its configuration gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.contract.errors import TrainingDataError
from paceline.methods.whole_model.cut_model import cut_model
from paceline.training.backbone import Backbone

SLIDING, FULL = "sliding_attention", "full_attention"


def save_target(path: Path, config: dict[str, Any]) -> Path:
    """A directory with a configuration and a number for each layer in place of its tensors."""
    (path / "config.json").write_text(json.dumps(config))
    tensors = {f"model.layers.{i}.input_layernorm.weight": torch.tensor([float(i)]) for i in range(8)}
    tensors |= {"model.embed_tokens.weight": torch.zeros(4, 2), "lm_head.weight": torch.zeros(4, 2)}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        # Layers 0, 1 and 7 are kept.
        ({"model_type": "gemma3_text", "sliding_window_pattern": 4}, [SLIDING, SLIDING, FULL]),
        ({"model_type": "gemma3_text", "_sliding_window_pattern": 4}, [SLIDING, SLIDING, SLIDING]),
        ({"model_type": "gemma2"}, [SLIDING, FULL, FULL]),
        ({"model_type": "gemma3_text", "layer_types": [*[FULL] * 7, SLIDING]}, [FULL, FULL, SLIDING]),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 5},
            [FULL, FULL, SLIDING],
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            [FULL, SLIDING, SLIDING],
        ),
        ({"model_type": "qwen2"}, [FULL, FULL, FULL]),
    ],
)
def test_layers_keep_their_kinds(config: dict[str, Any], kinds: list[str], tmp_path: Path) -> None:
    cut, weights = cut_model(save_target(tmp_path, {**config, "num_hidden_layers": 8}), 3)
    assert cut["layer_types"] == kinds
    assert cut["num_hidden_layers"] == 3
    layers = [weights[f"model.layers.{i}.input_layernorm.weight"].item() for i in range(3)]
    assert layers == [0.0, 1.0, 7.0]
    if config["model_type"] != "gemma2":
        windows = Backbone.from_config(cut).arch.windows
        assert [window is not None for window in windows] == [kind == SLIDING for kind in kinds]


def test_a_family_without_kinds_of_layers_gets_no_new_key(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 8, "rope_parameters": {"rope_theta": 5.0}}
    cut, _ = cut_model(save_target(tmp_path, config), 3)
    assert cut == {**config, "num_hidden_layers": 3}


def test_a_model_of_several_parts_is_refused(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 8}
    with pytest.raises(TrainingDataError, match="'gemma3' has several parts"):
        cut_model(save_target(tmp_path, {"model_type": "gemma3", "text_config": text}), 3)
