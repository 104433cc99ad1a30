"""AMD's layout of PARD and PARD-2: what comes in drafts as transformers computes it, what goes out comes in again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.checkpoints import export_checkpoint, import_checkpoint
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.target import SequenceRows, TargetEngine
from tests.methods.foreign import byte_fallback_tokenizer, byte_level_tokenizer, save_model

VOCAB, HIDDEN, TARGET_HIDDEN, MASK, SCALE = 97, 32, 64, 96, 0.1
PUBLIC_LAYERS = [-1, -3, 2, -5]  # of a target with 8 layers: final norm, and what enters layers 6, 2 and 4


def _save_model(path: Path, hidden: int, num_layers: int, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=96, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        initializer_range=0.3, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save_model(tmp_path_factory.mktemp("target"), TARGET_HIDDEN, 8, seed=0)


def _public(path: Path, method: str, **changes: object) -> Path:
    """A checkpoint as the authors publish it, the pickle converted."""
    _save_model(path, HIDDEN, 2, seed=1)
    content = json.loads((path / "config.json").read_text())
    content |= {"pard_token": MASK, "spd_type": method.replace("pard1", "pard")}
    if method == "pard2":
        content |= {
            "pard2": True, "pard2_scale": SCALE, "pard2_proj_bias": False, "pard2_target_dim": 4 * TARGET_HIDDEN,
            "pard2_target_layers": PUBLIC_LAYERS,
        }  # fmt: skip
        random = torch.Generator().manual_seed(4)
        weight = torch.randn(HIDDEN, 4 * TARGET_HIDDEN, generator=random) * 0.1
        save_file({"target_proj.weight": weight}, path / "warp_model.safetensors")
    content |= changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return path


def _reference(public: Path, target: Path, tokens: list[int], num_depths: int) -> list[int]:
    """The published loop: features shifted by one behind a zero row, the last one repeated for the placeholders."""
    content = json.loads((public / "config.json").read_text())
    drafter = LlamaForCausalLM.from_pretrained(public, dtype=torch.float32)
    ids = torch.tensor([*tokens, *[MASK] * (num_depths - 1)])
    with torch.inference_mode():
        x = drafter.model.embed_tokens(ids)
        if content.get("pard2"):
            model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
            states = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            joined = torch.cat([states[i] for i in PUBLIC_LAYERS], dim=-1)[0, :-1]
            features = joined @ load_file(public / "warp_model.safetensors")["target_proj.weight"].T
            features = torch.cat([torch.zeros(1, HIDDEN), features])
            x = x + SCALE * torch.cat([features, features[-1:].expand(num_depths - 1, -1)])
        logits = drafter(inputs_embeds=x[None]).logits[0, -num_depths:]
        logits[:, MASK] = -torch.inf
    return logits.argmax(-1).tolist()


def _drafted(directory: Path, target: Path, tokens: list[int], num_tokens: int) -> list[int]:
    drafter = load_drafter(directory, target, dtype=torch.float32)
    drafter.open(1, tokens)
    if drafter.tap is not None:
        engine = TargetEngine.load(target, "cpu", torch.float32, taps=[drafter.tap])
        output = engine.step([SequenceRows(engine.open(), tokens, num_logits="none")])
        drafter.feed(1, 0, output.features[0][:-1])
    (entry,) = drafter.draft([DraftRequest(1, num_tokens)])
    assert entry is not None
    return list(entry.tokens)


@pytest.mark.parametrize("method", ["pard1", "pard2"])
def test_what_comes_in_drafts_as_published_and_goes_out_the_same(
    method: str, target: Path, tmp_path: Path
) -> None:
    public = _public(tmp_path / "public", method)
    tokens = torch.randint(3, 90, (13,), generator=torch.Generator().manual_seed(2)).tolist()
    config = import_checkpoint(public, target, tmp_path / "own")
    assert config.method == method
    if method == "pard2":
        assert config.shape["tap_layers"] == [6, 2, 4]
        assert config.shape["norm_final"]
    expected = _reference(public, target, tokens, 7)
    assert len(set(expected)) > 1
    assert _drafted(tmp_path / "own", target, tokens, 7) == expected
    export_checkpoint(tmp_path / "own", "pard", tmp_path / "out", target_dir=target)
    before, after = (load_file(p / "model.safetensors") for p in (public, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    again = import_checkpoint(tmp_path / "out", target, tmp_path / "again")
    assert again.shape == config.shape | {"model": again.shape["model"]}
    assert _drafted(tmp_path / "again", target, tokens, 7) == expected
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pard_token"] == MASK


def test_pard2_without_features_is_pard1(target: Path, tmp_path: Path) -> None:
    """The directory itself, and the model of an imported one, serve without features, and for other targets too."""
    public = _public(tmp_path / "public", "pard2")
    import_checkpoint(public, target, tmp_path / "own")
    tokens = list(range(5, 19))
    plain = _drafted(public, target, tokens, 5)
    assert DrafterConfig.read(tmp_path / "own" / "model").method == "pard1"
    assert _drafted(tmp_path / "own" / "model", target, tokens, 5) == plain
    assert _drafted(tmp_path / "own", target, tokens, 5) != plain


def test_older_names_and_defaults(target: Path, tmp_path: Path) -> None:
    older = {
        "pard2_scale": None, "pard2_target_layers": None, "pard2_target_dim": None, "pard_scale": SCALE,
        "target_layers": PUBLIC_LAYERS, "pard_target_dim": 4 * TARGET_HIDDEN,
    }  # fmt: skip
    config = import_checkpoint(_public(tmp_path / "older", "pard2", **older), target, tmp_path / "own")
    assert config.shape["tap_layers"] == [6, 2, 4]
    assert config.shape["scale"] == SCALE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pard_token": VOCAB}, "mask_token must be a token from 0 to 96"),
        ({"pard2_target_layers": [-1, -8, -16, -24]}, "not all indices of 9 hidden states"),
        ({"pard2_target_layers": [-1, 8, 2, 3]}, "name a state twice"),
        ({"pard2_target_dim": 128}, "pard2_target_dim is 128"),
        ({"pard2_proj_bias": True}, "target_proj.bias is missing"),
        ({"pard2_target_layers": [-1, 2, 3], "pard2_target_dim": None}, "target_proj.weight has shape"),
        ({"pard2_proj_bias": "no"}, "pard2_proj_bias must be true or false"),
    ],
)
def test_what_makes_no_sense_is_named(
    changes: dict[str, object], message: str, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(_public(tmp_path / "public", "pard2", **changes), target, tmp_path / "own")


def test_a_pickle_is_refused_with_the_way_to_convert_it(target: Path, tmp_path: Path) -> None:
    public = _public(tmp_path / "public", "pard2")
    (public / "warp_model.safetensors").rename(public / "warp_model.bin")
    with pytest.raises(CheckpointError, match=r"warp_model\.bin is a pickle.*weights_only=True"):
        import_checkpoint(public, target, tmp_path / "own")


def test_a_value_that_is_no_number_is_refused(target: Path, tmp_path: Path) -> None:
    public = _public(tmp_path / "public", "pard1")
    tensors: dict[str, Tensor] = load_file(public / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, public / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds values"):
        import_checkpoint(public, target, tmp_path / "own")


def _mask(path: Path) -> Path:
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"pard_token": MASK}))
    return path


def test_a_tokenizer_comes_along_both_ways_and_tells_that_a_padded_head_fits(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    vocab = tokenizer.get_vocab_size()
    target = save_model(tmp_path / "target", tokenizer, vocab + 12, seed=1)
    public = _mask(save_model(tmp_path / "public", tokenizer, vocab, seed=2))
    tokens = list(range(5, 19))
    expected = _drafted(public, target, tokens, 5)
    import_checkpoint(public, target, tmp_path / "own")
    assert _drafted(tmp_path / "own", target, tokens, 5) == expected
    export_checkpoint(tmp_path / "own", "pard", tmp_path / "out", target_dir=target)
    assert _drafted(tmp_path / "out", target, tokens, 5) == expected
    stored = (public / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == stored


@pytest.mark.parametrize("has_own", [True, False])
def test_what_is_not_told_to_have_the_target_s_tokenizer_is_refused_as_when_served(
    has_own: bool, tmp_path: Path
) -> None:
    ours, other = byte_level_tokenizer(), byte_fallback_tokenizer()
    target = save_model(tmp_path / "target", ours, 400, seed=1)
    # Of one size: without a look at the tokenizers nothing is amiss.
    public = _mask(
        save_model(tmp_path / "public", other if has_own else None, 400 if has_own else 390, seed=2)
    )
    message = "has another tokenizer than target" if has_own else r"no tokenizer\.json says how they relate"
    with pytest.raises(CheckpointError, match=message):
        load_drafter(public, target, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(public, target, tmp_path / "own")
    assert not (tmp_path / "own").exists()
