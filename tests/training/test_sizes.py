"""Sizes of a target are what transformers makes of its configuration; what no objective computes is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import TrainingDataError
from paceline.training.sizes import ModelSizes
from paceline.training.teacher import llama_sizes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "soft cap"),
        ({"model_type": "gemma2"}, "soft cap"),  # by default
        ({"model_type": "recurrent_gemma"}, "soft cap"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "logits_scaling 8.0"),
        ({"model_type": "minicpm3"}, "logits_scaling 10.0"),
        ({"model_type": "cohere"}, "logit_scale 0.0625"),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.5}, "lm_head_multiplier 0.5"),
    ],
)
def test_logits_that_are_bent_or_scaled_behind_the_head_are_refused(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingDataError, match=message):
        ModelSizes.from_config(config)


def test_scales_that_do_nothing_are_taken() -> None:
    assert ModelSizes.from_config({"model_type": "granite", "logits_scaling": 1.0}).vocab == 32000
    assert ModelSizes.from_config({"model_type": "cohere", "logit_scale": 1.0}).hidden == 8192


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "model_type None is not known"),
        ({"model_type": "no-such-model"}, "'no-such-model' is not known"),
        ({"model_type": ["llama"]}, "is not known"),
        ({"model_type": "llama", "num_hidden_layers": "four"}, "'llama'.*'num_hidden_layers' expected int"),
        ({"model_type": "llama", "hidden_size": 10, "num_attention_heads": 3}, "'llama'.*not a multiple"),
        ({"model_type": "llama", "num_attention_heads": 0}, "'llama'"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}, "'llama'.*factor"),
        ({"model_type": "gemma3", "text_config": 5}, "'gemma3'.*text_config"),
        ({"model_type": "gemma3_text", "text_config": 5}, "'gemma3_text'"),
        ({"model_type": "mamba"}, "'mamba' has no 'num_attention_heads'"),
        ({"model_type": "llama", "vocab_size": 0}, "'vocab_size' is 0"),
    ],
)
def test_configurations_that_do_not_read_say_what_is_wrong(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingDataError, match=message):
        ModelSizes.from_config(config)


def test_a_directory_without_a_readable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingDataError, match=r"config\.json"):
        ModelSizes.read(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(TrainingDataError, match=r"config\.json"):
            ModelSizes.read(tmp_path)


def test_what_a_file_leaves_out_is_the_familys_default() -> None:
    sizes = ModelSizes.from_config(
        {"model_type": "gemma3_text", "hidden_size": 640, "num_attention_heads": 4}
    )
    assert sizes.head_dim == 256  # not 640 / 4
    assert sizes.rope_theta == 1_000_000.0
    assert ModelSizes.from_config({"model_type": "qwen2"}).max_positions == 32768
    assert ModelSizes.from_config({"model_type": "llama", "rope_theta": 7.0}).rope_theta == 7.0  # older files


def test_sizes_of_a_model_with_several_parts_are_its_texts(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma3_text", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
        "head_dim": 2, "intermediate_size": 16, "vocab_size": 32,
        "rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 3.0}},
    }  # fmt: skip
    whole = {"model_type": "gemma3", "text_config": text}
    sizes = ModelSizes.from_config(whole)
    assert (sizes.hidden, sizes.head_dim, sizes.num_kv_heads, sizes.rope_theta) == (8, 2, 4, 7.0)
    assert sizes.norm_offset == 1.0
    assert text["rope_parameters"] == {  # transformers would complete it in place
        "full_attention": {"rope_theta": 7.0},
        "sliding_attention": {"rope_theta": 3.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert ModelSizes.read(tmp_path) == sizes


def test_layers_that_differ_in_heads_have_the_configurations_own() -> None:
    sizes = ModelSizes.from_config({"model_type": "gemma4_text", "head_dim": 32})
    assert sizes.head_dim == 32
    assert sizes.norm_offset == 0.0


def test_the_teacher_refuses_scaled_positions_by_either_name() -> None:
    for scaled in (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ):
        with pytest.raises(TrainingDataError, match="'linear'"):
            llama_sizes({"model_type": "llama", **scaled})
    assert llama_sizes({"model_type": "llama"}).rope_theta == 10000.0
