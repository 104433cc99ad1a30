"""Block drafters in the speculators format: what is read computes what the published rules say, and comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoints import export_checkpoint, import_checkpoint
from paceline.methods.checkpoint import CheckpointError
from paceline.methods.layouts.target_facts import TargetFacts
from tests.checkpoints.blocks import (
    CASES,
    our_block,
    public_config,
    random_weights,
    reference_block,
)
from tests.checkpoints.conftest import VOCAB, random_taps, text
from tests.checkpoints.reference import write_public

FOLLOWING = [11, 23, 42, 8, 70]


@pytest.mark.parametrize("name", CASES)
def test_an_imported_checkpoint_computes_what_the_published_rules_say(
    name: str, target: TargetFacts, target_dir: Path, tmp_path: Path
) -> None:
    case, tokens, taps = CASES[name], text(12), random_taps(11)
    weights = random_weights(case)
    write_public(tmp_path / "public", public_config(case), weights)
    config = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    assert config.method == case.kind
    assert config.shape["tap_layers"] == [1, 2, 4]
    ours = our_block(tmp_path / "own", target_dir, case, taps, tokens, FOLLOWING)
    embedding = target.embedding(torch.float32)
    theirs = reference_block(case, weights, embedding, taps, tokens, FOLLOWING)
    for found, expected in zip(ours, theirs, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
            assert expected.std() > 0.1


@pytest.mark.parametrize("name", CASES)
def test_what_was_imported_is_exported_as_it_was(name: str, target_dir: Path, tmp_path: Path) -> None:
    case = CASES[name]
    weights = random_weights(case)
    write_public(tmp_path / "public", public_config(case), weights)
    import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    export_checkpoint(tmp_path / "own", "speculators", tmp_path / "again", verifier="someone/model")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    content, before = json.loads((tmp_path / "again" / "config.json").read_text()), public_config(case)
    assert content["speculators_config"]["verifier"]["name_or_path"] == "someone/model"
    (proposal,) = content["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == case.shape.num_drafts
    for field in before.keys() - {"speculators_config", "transformer_layer_config"}:
        assert content[field] == before[field], field
    for field, value in before["transformer_layer_config"].items():
        assert content["transformer_layer_config"][field] == value


def test_what_is_the_targets_is_not_kept_and_a_reduced_head_is_written_back(
    target: TargetFacts, target_dir: Path, tmp_path: Path
) -> None:
    case = CASES["dspark"]
    embedding = target.embedding(torch.float32)
    weights = random_weights(case) | {"lm_head.weight": embedding[case.draft_ids]}
    write_public(tmp_path / "public", public_config(case), weights | {"embed_tokens.weight": embedding})
    config = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    assert not {"has_embedding", "has_head"} & set(config.shape)
    kept = load_file(tmp_path / "own" / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(kept)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: .*name the target"):
        export_checkpoint(tmp_path / "own", "speculators", tmp_path / "without")
    export_checkpoint(tmp_path / "own", "speculators", tmp_path / "with", target_dir)
    written = load_file(tmp_path / "with" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert torch.equal(written["lm_head.weight"], weights["lm_head.weight"])


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sliding window": (
        {},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
        "layer_types: sliding_attention",
    ),
    "no taps": ({"aux_hidden_state_layer_ids": None}, {}, "aux_hidden_state_layer_ids None"),
    "tap beyond": ({"aux_hidden_state_layer_ids": [1, 2, 9]}, {}, "not distinct layers from 0 to 8"),
    "fewer taps": ({"aux_hidden_state_layer_ids": [1, 2]}, {}, r"fc\.weight has shape \(64, 192\)"),
    "layout": ({"sample_from_anchor": "yes"}, {}, "sample_from_anchor must be true or false"),
    "block": ({"block_size": 0}, {}, "block_size must be a positive"),
    "mask": ({"mask_token_id": None}, {}, "neither mask_token_id nor ptd_token_id"),
    "head": ({"markov_head_type": "lstm"}, {}, "markov_head"),
    "no Markov head": ({"markov_rank": 0}, {}, "markov_rank must be a positive"),
    "another rank": ({"markov_rank": 9}, {}, r"markov_w1\.weight has shape \(97, 12\), not \(97, 9\)"),
    "recurrent infilling": (
        {"markov_head_type": "rnn", "sample_from_anchor": False},
        {},
        "'rnn' is not computed",
    ),
    "no confidence": (
        {"enable_confidence_head": False},
        {},
        r"confidence_head\.proj\.bias is surplus; confidence_head\.proj\.weight is surplus",
    ),
    "more layers": ({}, {"num_hidden_layers": 3}, r"layers\.2\..* is missing"),
    "another target": ({}, {"vocab_size": VOCAB + 1}, "it is another's"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name(name: str, target_dir: Path, tmp_path: Path) -> None:
    case = CASES["dspark"]
    flags, layer, message = REFUSED[name]
    content = {**public_config(case), **flags}
    content["transformer_layer_config"] = {**content["transformer_layer_config"], **layer}
    write_public(tmp_path / "public", content, random_weights(case))
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_a_layout_that_is_not_said_is_asked_for(target_dir: Path, tmp_path: Path) -> None:
    for name in ("dspark", "dflash"):
        content = public_config(CASES[name])
        del content["sample_from_anchor"]
        write_public(tmp_path / name, content, random_weights(CASES[name]))
    with pytest.raises(CheckpointError, match="sample_from_anchor is missing"):
        import_checkpoint(tmp_path / "dspark", target_dir, tmp_path / "own")
    assert not import_checkpoint(tmp_path / "dflash", target_dir, tmp_path / "own").shape["anchor_first"]


def test_tensors_that_do_not_fit_are_named(target_dir: Path, tmp_path: Path) -> None:
    case = CASES["dspark"]
    weights = random_weights(case)
    del weights["lm_head.weight"], weights["hidden_norm.weight"], weights["markov_head.markov_w2.weight"]
    weights["layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    write_public(tmp_path / "public", public_config(case), weights)
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    for part in (
        "lm_head.weight is missing",
        "hidden_norm.weight is missing",
        "markov_head.markov_w2.weight is missing",
        "layers.0.self_attn.q_proj.bias is surplus",
    ):
        assert part in str(caught.value)
