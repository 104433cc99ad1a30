"""P-EAGLE's own layout: the published names, what is computed from them, and the same file back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoints import export_checkpoint, import_checkpoint
from paceline.checkpoints.formats import find_format
from paceline.methods.checkpoint import CheckpointError
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from tests.checkpoints.conftest import (
    LLAMA3,
    MASK_TOKEN,
    NUM_DEPTHS,
    VOCAB,
    WIDTH,
    Case,
    our_logits,
    random_taps,
    text,
)
from tests.checkpoints.reference import random_weights, reference_logits, write_public

LAYERS = {"num_hidden_layers": 4, "rope_parameters": LLAMA3}
CASE = Case("peagle", layer=LAYERS, flags={"mask_token_id": MASK_TOKEN})
WHOLE = Case("peagle", layer=LAYERS, flags={"mask_token_id": MASK_TOKEN}, draft_vocab=VOCAB)

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
PUBLISHED = {
    *("embed_tokens.weight", "fc.weight", "mask_hidden", "norm.weight", "lm_head.weight", "d2t", "t2d"),
    "midlayer.hidden_norm.weight",
    *(f"midlayer.{name}.weight" for name in (*PROJECTIONS, *GATED, *NORMS)),
    *(f"layers.{i}.{name}.weight" for i in (1, 2, 3) for name in (*PROJECTIONS, *GATED, *NORMS)),
}
"""Tensors of the authors' four-layer checkpoints."""


def flat_config(case: Case = CASE) -> dict[str, Any]:
    """As the authors write it: no depths, and of a rotary variant what transformers 4 names."""
    layer = case.layer_config
    rope = {name: value for name, value in layer.pop("rope_parameters").items() if name != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        "rope_theta": 10000.0,
        "rope_scaling": rope,
        "draft_vocab_size": case.draft_vocab,
        "parallel_drafting": True,
        "ptd_token_id": MASK_TOKEN,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def flat_weights(case: Case = CASE) -> dict[str, Tensor]:
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor for name, tensor in random_weights(case).items()
    }
    if case.draft_vocab == VOCAB:
        tensors |= {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    return tensors


@pytest.mark.parametrize("case", [CASE, WHOLE], ids=["reduced", "whole"])
def test_the_published_names_are_read_computed_and_written(
    case: Case, target_dir: Path, tmp_path: Path
) -> None:
    weights, content = flat_weights(case), flat_config(case) | {"num_depths": NUM_DEPTHS}
    assert weights.keys() == PUBLISHED
    content["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]
    write_public(tmp_path / "public", content, weights)
    assert find_format(tmp_path / "public").name == "p_eagle"
    config = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    assert (config.method, config.shape["mask_token"]) == ("p_eagle", MASK_TOKEN)
    tokens, taps = text(12), random_taps(12)
    expected = reference_logits(case, random_weights(case), taps, tokens)
    torch.testing.assert_close(
        our_logits(tmp_path / "own", target_dir, taps, tokens), expected, rtol=1e-4, atol=1e-4
    )
    export_checkpoint(tmp_path / "own", "p_eagle", tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == PUBLISHED
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    said = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: said[name] for name in content} == content
    import_checkpoint(tmp_path / "again", target_dir, tmp_path / "twice")
    assert (tmp_path / "twice" / "config.json").read_text() == (tmp_path / "own" / "config.json").read_text()


def test_what_is_not_said_is_what_vllm_takes(target_dir: Path, tmp_path: Path) -> None:
    write_public(tmp_path / "public", flat_config(), flat_weights())
    config = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    assert config.shape["tap_layers"] == [2, 4, 5]
    assert config.shape["num_depths"] == 8
    drafter = load_drafter(tmp_path / "own", target_dir, dtype=torch.float32)
    assert drafter.longest_draft == 8
    drafter.open(1, text(9))
    drafter.feed(1, 0, random_taps(8)[:, :WIDTH])
    (entry,) = drafter.draft([DraftRequest(1, 8)])
    assert entry is not None
    assert set(entry.tokens) <= set(CASE.draft_ids.tolist())
    del (content := flat_config())["draft_vocab_size"]
    write_public(tmp_path / "public", content, flat_weights(WHOLE))
    assert import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own").shape["draft_vocab"] == VOCAB


def _unmarked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "t2d"}


VARIANTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any]]] = {
    "first layer numbered": (
        lambda tensors: {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()},
        {},
    ),
    "wrapped": (
        lambda tensors: {
            name if name in ("lm_head.weight", "d2t", "t2d", "mask_hidden") else "model." + name: t
            for name, t in tensors.items()
        },
        {"ptd_token_id": None, "mask_token_id": MASK_TOKEN, "pard_token": MASK_TOKEN},
    ),
    "flat mask": (lambda tensors: {**tensors, "mask_hidden": tensors["mask_hidden"].view(1, -1)}, {}),
    "no marks": (_unmarked, {}),
    "layers within": (dict, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_files_that_differ_in_details_are_the_same_drafter(
    name: str, target_dir: Path, tmp_path: Path
) -> None:
    change, fields = VARIANTS[name]
    write_public(tmp_path / "plain", flat_config(), flat_weights())
    write_public(tmp_path / "public", {**flat_config(), **fields}, change(flat_weights()))
    same = import_checkpoint(tmp_path / "plain", target_dir, tmp_path / "own")
    assert import_checkpoint(tmp_path / "public", target_dir, tmp_path / "other") == same
    one, other = (load_file(tmp_path / x / "model.safetensors") for x in ("own", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_biases_are_told_by_the_tensors(target_dir: Path, tmp_path: Path) -> None:
    tensors = flat_weights()
    for layer in ("midlayer.", "layers.1.", "layers.2.", "layers.3."):
        for x, width in (("q", 64), ("k", 32), ("v", 32)):
            tensors[f"{layer}self_attn.{x}_proj.bias"] = torch.full((width,), 0.1)
    content = flat_config() | {"attention_bias": True}
    write_public(tmp_path / "public", content, tensors)
    assert import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own").shape["qkv_bias"] is True
    export_checkpoint(tmp_path / "own", "p_eagle", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["attention_bias"] is True
    tensors["midlayer.self_attn.o_proj.bias"] = torch.zeros(WIDTH)
    write_public(tmp_path / "public", content, tensors)
    with pytest.raises(CheckpointError, match=r"o_proj\.bias is surplus"):
        import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"hidden_size": 32}, "^config.json: hidden_size is 32, the target's is 64"),
    "no token": ({"ptd_token_id": None}, "neither mask_token_id nor ptd_token_id names"),
    "another token": ({"ptd_token_id": VOCAB}, "must be a token from 0 to 96"),
    "one stream": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    "a layer more": ({"num_hidden_layers": 5}, r"layers\.4\..* is missing"),
    "gated biases": ({"mlp_bias": True}, "mlp_bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str, target_dir: Path, tmp_path: Path) -> None:
    fields, message = REFUSED[name]
    write_public(tmp_path / "public", {**flat_config(), **fields}, flat_weights())
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_a_mask_row_needs_its_feature(target_dir: Path, tmp_path: Path) -> None:
    tensors = flat_weights()
    del tensors["mask_hidden"]
    write_public(tmp_path / "public", flat_config(), tensors)
    with pytest.raises(CheckpointError, match="mask_hidden is missing"):
        import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")


def test_what_the_layout_cannot_say_is_refused(target_dir: Path, tmp_path: Path) -> None:
    from tests.checkpoints.conftest import CASES
    from tests.checkpoints.reference import public_config

    for name, message in (
        ("parallel-qwen3-whole-vocabulary", "head_norms"),
        ("plain", "method 'eagle3' has no place in format 'p_eagle'"),
    ):
        write_public(tmp_path / "public", public_config(CASES[name]), random_weights(CASES[name]))
        import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
        with pytest.raises(CheckpointError, match=message):
            export_checkpoint(tmp_path / "own", "p_eagle", tmp_path / "again")
