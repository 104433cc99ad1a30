"""The speculators format: what is read computes what the published rules say, and comes back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoints import export_checkpoint, import_checkpoint
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.drafter import DraftRequest
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.loading import load_drafter
from tests.checkpoints.conftest import (
    CASES,
    MASK_TOKEN,
    NUM_DEPTHS,
    VOCAB,
    Case,
    our_logits,
    random_taps,
    text,
)
from tests.checkpoints.reference import public_config, random_weights, reference_logits, write_public


@pytest.mark.parametrize("name", CASES)
def test_an_imported_checkpoint_computes_what_the_published_rules_say(
    name: str, target_dir: Path, tmp_path: Path
) -> None:
    case, tokens, taps = CASES[name], text(12), random_taps(12)
    weights = random_weights(case)
    write_public(tmp_path / "public", public_config(case), weights)
    config = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    assert config.method == {"eagle3": "eagle3", "peagle": "p_eagle"}[case.kind]
    assert config.shape["tap_layers"] == [1, 2, 4]
    ours = our_logits(tmp_path / "own", target_dir, taps, tokens)
    reference = reference_logits(case, weights, taps, tokens)
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
    assert reference.std() > 0.1


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
    content = json.loads((tmp_path / "again" / "config.json").read_text())
    before = public_config(case)
    assert content["speculators_config"]["verifier"]["name_or_path"] == "someone/model"
    for field in (
        "speculators_model_type",
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        *case.flags,
    ):
        assert content[field] == before[field]
    for field, value in case.layer_config.items():
        assert content["transformer_layer_config"][field] == value
    if case.kind == "peagle":
        assert content["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == NUM_DEPTHS


def test_an_embedding_that_is_the_targets_is_not_kept_and_can_be_written_back(
    target: TargetFacts, target_dir: Path, tmp_path: Path
) -> None:
    case = CASES["plain"]
    weights = random_weights(case) | {"embed_tokens.weight": target.embedding(torch.float32)}
    write_public(tmp_path / "public", public_config(case), weights)
    config = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    assert "has_embedding" not in config.shape
    assert "embed_tokens.weight" not in load_file(tmp_path / "own" / "model.safetensors")
    export_checkpoint(tmp_path / "own", "speculators", tmp_path / "without")
    assert "embed_tokens.weight" not in load_file(tmp_path / "without" / "model.safetensors")
    export_checkpoint(tmp_path / "own", "speculators", tmp_path / "with", target_dir)
    written = load_file(tmp_path / "with" / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], weights["embed_tokens.weight"])


def test_a_parallel_drafter_without_an_embedding_gets_the_targets(
    target: TargetFacts, target_dir: Path, tmp_path: Path
) -> None:
    case = CASES["parallel"]
    weights = random_weights(case)
    del weights["embed_tokens.weight"]
    write_public(tmp_path / "public", public_config(case), weights)
    import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding(torch.float32))


def test_shards_and_older_names_are_read(target_dir: Path, tmp_path: Path) -> None:
    case = CASES["parallel"]
    content, weights = public_config(case), random_weights(case)
    content["ptd_token_id"] = content.pop("mask_token_id")
    content["para_depths"] = 7
    del content["eagle_aux_hidden_state_layer_ids"]
    layer = content["transformer_layer_config"]
    layer |= {"rope_theta": 4e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    del layer["rope_parameters"]
    write_public(tmp_path / "public", content, weights)
    names = sorted(weights)
    for index, part in enumerate((names[:9], names[9:])):
        save_file({n: weights[n] for n in part}, tmp_path / "public" / f"part-{index}.safetensors")
    (tmp_path / "public" / "model.safetensors").unlink()
    where = {n: f"part-{int(i >= 9)}.safetensors" for i, n in enumerate(names)}
    (tmp_path / "public" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    config = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    assert config.shape["num_depths"] == 7
    assert config.shape["mask_token"] == MASK_TOKEN
    assert config.shape["tap_layers"] == [2, 4, 5]
    assert config.shape["rope_parameters"]["factor"] == 2.0
    assert config.shape["rope_parameters"]["rope_theta"] == 4e4


def test_drafts_map_to_the_targets_ids_and_layers_can_be_named(target_dir: Path, tmp_path: Path) -> None:
    case = CASES["parallel"]
    write_public(tmp_path / "public", public_config(case), random_weights(case))
    config = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own", "speculators", [0, 1, 3])
    assert config.shape["tap_layers"] == [0, 1, 3]
    drafter = load_drafter(tmp_path / "own", target_dir, dtype=torch.float32)
    assert drafter.tap is not None
    assert drafter.tap.layers == (0, 1, 3)
    drafter.open(1, text(9))
    drafter.feed(1, 0, random_taps(8)[:, :64])
    (entry,) = drafter.draft([DraftRequest(1, NUM_DEPTHS)])
    assert entry is not None
    assert set(entry.tokens) <= set(case.draft_ids.tolist())
    with pytest.raises(CheckpointError, match=r"\[0, 1\] cannot replace"):
        import_checkpoint(tmp_path / "public", target_dir, tmp_path / "other", None, [0, 1])
    with pytest.raises(CheckpointError, match=r"within 0\.\.8"):
        import_checkpoint(tmp_path / "public", target_dir, tmp_path / "other", None, [0, 1, 9])


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another kind": (
        {"speculators_model_type": "hydra"},
        {},
        "'hydra' is none of dflash, dspark, eagle3, peagle",
    ),
    "norm before fc": ({"norm_before_fc": True}, {}, "norm_before_fc"),
    "norms before fc": ({"fc_norm": True}, {}, "fc_norm"),
    "another width": ({"target_hidden_size": 128}, {}, "target_hidden_size"),
    "another target": ({}, {"hidden_size": 32}, "hidden_size is 32, the target's is 64"),
    "another vocabulary": ({}, {"vocab_size": 98}, "vocab_size is 98, the target's is 97"),
    "larger draft vocabulary": ({"draft_vocab_size": 98}, {}, "draft_vocab_size must be from 1 to 97"),
    "no layers": ({"transformer_layer_config": None}, {}, "transformer_layer_config is missing"),
    "another family": ({}, {"model_type": "mamba"}, "'mamba' is none of llama, qwen3"),
    "attention biases": ({}, {"attention_bias": True}, "attention_bias"),
    "gated biases": ({}, {"mlp_bias": True}, "mlp_bias"),
    "activation": ({}, {"hidden_act": "gelu"}, "'gelu' is not silu"),
    "sliding window": (
        {},
        {
            "model_type": "qwen3",
            "layer_types": ["sliding_attention"] * 4,
            "sliding_window": 8,
            "use_sliding_window": True,
        },
        "layer_types: sliding_attention",
    ),
    "rope": (
        {},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "'dynamic' is none of",
    ),
    "heads": ({}, {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple"),
    "layer beyond": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, "not distinct layers from 0 to 8"),
    "same layer": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}, {}, "not distinct layers"),
    "two layers": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2]},
        {},
        r"fc\.weight has shape \(64, 192\), not \(64, 128\)",
    ),
    "switch": ({"norm_before_residual": "yes"}, {}, "norm_before_residual must be true or false"),
    "mask beyond": ({"mask_token_id": 97}, {}, "mask_token_id must be a token from 0 to 96"),
    "no mask": ({"mask_token_id": None}, {}, "neither mask_token_id nor ptd_token_id"),
    "no depth": ({"speculators_config": {}}, {}, "speculative_tokens"),
    "more layers": ({}, {"num_hidden_layers": 5}, r"layers\.4\..* is missing"),
    "fewer layers": ({}, {"num_hidden_layers": 3}, r"layers\.3\..* is surplus"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name(name: str, target_dir: Path, tmp_path: Path) -> None:
    case = CASES["parallel"]
    flags, layer, message = REFUSED[name]
    content = {**public_config(case), **flags}
    if content["transformer_layer_config"] is not None:
        content["transformer_layer_config"] = {**case.layer_config, **layer}
    write_public(tmp_path / "public", content, random_weights(case))
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_tensors_that_do_not_fit_are_named(target_dir: Path, tmp_path: Path) -> None:
    case = CASES["plain"]
    weights = random_weights(case)
    broken = {k: v for k, v in weights.items() if k != "layers.0.hidden_norm.weight"}
    broken["layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    broken["norm.weight"] = torch.ones(63)
    write_public(tmp_path / "a", public_config(case), broken)
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(tmp_path / "a", target_dir, tmp_path / "own")
    for part in (
        "layers.0.hidden_norm.weight is missing",
        "layers.0.self_attn.q_norm.weight is surplus",
        "norm.weight has shape (63,), not (64,)",
    ):
        assert part in str(caught.value)
    write_public(
        tmp_path / "b", public_config(case), {**weights, "norm.weight": torch.full((64,), torch.nan)}
    )
    with pytest.raises(CheckpointError, match=r"norm\.weight holds values that are not numbers"):
        import_checkpoint(tmp_path / "b", target_dir, tmp_path / "own")
    write_public(tmp_path / "c", public_config(case), {**weights, "t2d": torch.ones(VOCAB, dtype=torch.bool)})
    with pytest.raises(CheckpointError, match="t2d does not mark"):
        import_checkpoint(tmp_path / "c", target_dir, tmp_path / "own")
    write_public(tmp_path / "d", public_config(case), {**weights, "d2t": weights["d2t"] + VOCAB})
    with pytest.raises(CheckpointError, match="d2t does not map"):
        import_checkpoint(tmp_path / "d", target_dir, tmp_path / "own")


def test_directories_that_are_no_checkpoints_say_what_to_do(target_dir: Path, tmp_path: Path) -> None:
    case = CASES["plain"]
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        import_checkpoint(tmp_path, target_dir, tmp_path / "own")
    with pytest.raises(CheckpointError, match=r"names \['LlamaForCausalLM'\]; known are .*eagle, "):
        import_checkpoint(target_dir, target_dir, tmp_path / "own")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps(public_config(case)))
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle.*save_file"):
        import_checkpoint(pickled, target_dir, tmp_path / "own")
    (pickled / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_checkpoint(pickled, target_dir, tmp_path / "own")
    (pickled / "model.safetensors").unlink()
    outside = {"weight_map": {"norm.weight": "../elsewhere.safetensors"}}
    (pickled / "model.safetensors.index.json").write_text(json.dumps(outside))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        import_checkpoint(pickled, target_dir, tmp_path / "own")
    write_public(tmp_path / "public", public_config(case), random_weights(case))
    import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    with pytest.raises(CheckpointError, match="Paceline's own: serve it as it is"):
        import_checkpoint(tmp_path / "own", target_dir, tmp_path / "other")
    with pytest.raises(CheckpointError, match="'gguf' is none of"):
        export_checkpoint(tmp_path / "own", "gguf", tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("normed-residual-wide-heads", "norm_before_residual"),
        ("normed-output", "norm_output"),
        ("qwen3-two-layers", "head_norms"),
        ("llama3-rope-three-layers", "num_layers.*not 3"),
        ("parallel", "method 'p_eagle' has no place"),
    ],
)
def test_what_eagles_own_layout_cannot_say_is_not_written_in_it(
    name: str, message: str, target_dir: Path, tmp_path: Path
) -> None:
    write_public(tmp_path / "public", public_config(CASES[name]), random_weights(CASES[name]))
    import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(tmp_path / "own", "eagle", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_formats_are_told_apart(target_dir: Path, tmp_path: Path) -> None:
    """One drafter, out in EAGLE's own layout and back in without naming it."""
    case = CASES["linear-rope"]
    write_public(tmp_path / "public", public_config(case), random_weights(case))
    import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    export_checkpoint(tmp_path / "own", "eagle", tmp_path / "eagle")
    again = import_checkpoint(tmp_path / "eagle", target_dir, tmp_path / "again")
    assert again.training["imported_from"] == "eagle"
    first, second = (load_file(tmp_path / part / "model.safetensors") for part in ("own", "again"))
    assert set(first) - set(second) <= {"embed_tokens.weight"}
    assert all(torch.equal(first[n], second[n]) for n in second)


def test_an_independent_drafter_cannot_be_exported(tmp_path: Path) -> None:
    config = DrafterConfig("independent", "0" * 64, "tiny", {"target_vocab": 97})
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"method": config.method, "target_fingerprint": config.target_fingerprint, "format_version": 1}
        )
    )
    with pytest.raises(CheckpointError, match=r"method 'independent' has no place.*paceline, transformers"):
        export_checkpoint(tmp_path, "speculators", tmp_path / "out")


def test_the_commands(target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli import main

    case: Case = CASES["plain"]
    write_public(tmp_path / "public", public_config(case), random_weights(case))

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["checkpoints", *arguments])
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    own, again = str(tmp_path / "own"), str(tmp_path / "again")
    code, out, _ = run("import", str(tmp_path / "public"), "--target", str(target_dir), "--output", own)
    assert (code, out.strip()) == (0, f"{own}: eagle3 for {target_dir.name}, reads layers [1, 2, 4]")
    code, out, _ = run("export", own, "--format", "speculators", "--output", again)
    assert (code, out.strip()) == (0, f"{again}: eagle3 as speculators")
    code, _, err = run("export", own, "--format", "speculators", "--output", again, "--target", own)
    assert code == 1
    assert "own' is no target: its config.json has no usable hidden_size" in err
    code, _, err = run(
        "import",
        str(tmp_path / "public"),
        "--target",
        str(target_dir),
        "--output",
        own,
        "--tap-layers",
        "a,b",
    )
    assert code == 2
    assert "tap-layers" in err
