"""The layouts that z-lab and DeepSpec publish block drafters in: read and written, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoints import export_checkpoint, import_checkpoint
from paceline.methods.checkpoint import CheckpointError
from paceline.methods.layouts.target_facts import TargetFacts
from tests.checkpoints.blocks import BlockCase, our_block, random_weights, reference_block
from tests.checkpoints.blocks import public_config as speculators_config
from tests.checkpoints.conftest import MASK_TOKEN, NUM_LAYERS, VOCAB, random_taps, text
from tests.checkpoints.reference import write_public

FOLLOWING = [11, 23, 42, 8, 70]
ZLAB = BlockCase(draft_vocab=VOCAB)
CASES = {
    "dflash": ZLAB,
    "deepspec": BlockCase("vanilla", anchor_first=True, draft_vocab=VOCAB),
    "deepspec-dflash": BlockCase(anchor_first=True, draft_vocab=VOCAB),
}


def public(name: str, target: TargetFacts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and tensors of a layout."""
    case = CASES[name]
    weights, known = random_weights(case), speculators_config(case)
    place = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 1, 3], "block_size": case.shape.block_size}
    content = {**known["transformer_layer_config"], "num_target_layers": NUM_LAYERS}
    if name == "dflash":
        return {**content, "architectures": ["DFlashDraftModel"], "dflash_config": place}, weights
    content |= {**place, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "markov_rank": 0}
    content["enable_confidence_head"] = bool(case.markov)
    if case.markov:
        content |= {k: known[k] for k in ("markov_rank", "markov_head_type", "confidence_head_with_markov")}
    embedding = target.embedding(torch.float32)
    return content, weights | {"embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}


def _import(name: str, target: TargetFacts, target_dir: Path, tmp_path: Path, **changes: Any) -> Any:
    content, weights = public(name, target)
    kept = {k: v for k, v in {**content, **changes}.items() if v is not None}
    write_public(tmp_path / "public", kept, weights)
    return import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")


@pytest.mark.parametrize("name", CASES)
def test_an_imported_checkpoint_computes_what_was_published(
    name: str, target: TargetFacts, target_dir: Path, tmp_path: Path
) -> None:
    case, tokens, taps = CASES[name], text(12), random_taps(11)
    config = _import(name, target, target_dir, tmp_path)
    assert (config.method, config.shape["tap_layers"]) == (case.kind, [1, 2, 4])
    assert not {"has_embedding", "has_head"} & set(config.shape)
    ours = our_block(tmp_path / "own", target_dir, case, taps, tokens, FOLLOWING)
    embedding = target.embedding(torch.float32)
    theirs = reference_block(case, public(name, target)[1], embedding, taps, tokens, FOLLOWING)
    for found, expected in zip(ours, theirs, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_what_was_imported_is_exported_as_it_was(
    name: str, target: TargetFacts, target_dir: Path, tmp_path: Path
) -> None:
    _import(name, target, target_dir, tmp_path)
    layout = name.partition("-")[0]
    export_checkpoint(tmp_path / "own", layout, tmp_path / "again", target_dir)
    content, weights = public(name, target)
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[key], weights[key]) for key in weights)
    found = json.loads((tmp_path / "again" / "config.json").read_text())
    assert all(found[key] == value for key, value in content.items())


def test_layers_that_are_not_named_are_spread(target: TargetFacts, target_dir: Path, tmp_path: Path) -> None:
    content, weights = public("dflash", target)
    del content["dflash_config"]["target_layer_ids"]
    weights["fc.weight"] = weights["fc.weight"][:, :128].contiguous()
    write_public(tmp_path / "public", content, weights)
    config = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    assert config.shape["tap_layers"] == [2, 6]  # outputs of layers 1 and 5 of 8


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("dflash", {"num_target_layers": 9}, "num_target_layers is 9, the target has 8"),
        ("dflash", {"is_causal": True}, "is_causal True is not computed"),
        ("dflash", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not computed"),
        ("dflash", {"dflash_config": {"selector_rank": 256}}, "DFlash 2 is not computed"),
        ("dflash", {"dflash_config": {"target_layer_ids": [-1, 0, 2]}}, r"target_layer_ids \[-1, 0, 2\]"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 1, 3]}}, "neither mask_token_id"),
        ("dflash", {"num_hidden_layers": 3}, r"layers\.2\..* is missing"),
        ("dflash", {"vocab_size": VOCAB + 1}, "it is another's"),
        ("deepspec", {"markov_rank": 5}, r"markov_w1\.weight has shape"),
        ("deepspec", {"markov_rank": 0}, "enable_confidence_head"),
        ("deepspec-dflash", {"target_layer_ids": None}, "target_layer_ids None"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    name: str, changes: dict[str, Any], said: str, target: TargetFacts, target_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        _import(name, target, target_dir, tmp_path, **changes)


def test_what_a_layout_cannot_say_is_refused_by_name(
    target: TargetFacts, target_dir: Path, tmp_path: Path
) -> None:
    _import("deepspec-dflash", target, target_dir, tmp_path)
    with pytest.raises(CheckpointError, match=r"shape\.anchor_first: z-lab's"):
        export_checkpoint(tmp_path / "own", "dflash", tmp_path / "out", target_dir)
    with pytest.raises(CheckpointError, match=r"shape\.has_embedding: .*name the target"):
        export_checkpoint(tmp_path / "own", "deepspec", tmp_path / "out")
    _import("dflash", target, target_dir, tmp_path)
    with pytest.raises(CheckpointError, match=r"shape\.anchor_first: every row"):
        export_checkpoint(tmp_path / "own", "deepspec", tmp_path / "out", target_dir)
    assert not (tmp_path / "out").exists()


def test_the_authors_package_computes_the_same(target: TargetFacts, target_dir: Path, tmp_path: Path) -> None:
    """Where the package `dflash` is importable (`pip install --no-deps dflash==0.1.0`)."""
    authors = pytest.importorskip("dflash.model", reason="the package dflash is not installed")
    _import("dflash", target, target_dir, tmp_path)
    export_checkpoint(tmp_path / "own", "dflash", tmp_path / "again", target_dir)
    model = authors.DFlashDraftModel.from_pretrained(str(tmp_path / "again"), dtype=torch.float32).eval()
    assert model.target_layer_ids == [0, 1, 3]
    case, tokens, taps = ZLAB, text(12), random_taps(11)
    embedding, size = target.embedding(torch.float32), case.shape.block_size
    block = embedding[torch.tensor([tokens[-1], *[model.mask_token_id] * (size - 1)])]
    with torch.no_grad():
        states = model(
            position_ids=torch.arange(11 + size)[None], noise_embedding=block[None], target_hidden=taps[None]
        )
    ours, _ = our_block(tmp_path / "own", target_dir, case, taps, tokens, FOLLOWING)
    torch.testing.assert_close(ours, states[0, 1:] @ embedding.T, rtol=1e-4, atol=1e-3)
