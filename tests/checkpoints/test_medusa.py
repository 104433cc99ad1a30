"""Public Medusa checkpoints: modules of the published layouts and our heads give the same logits, there and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.checkpoints.exchange import read_public
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, save_drafter
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.loading import load_drafter
from paceline.methods.medusa_heads.heads import MedusaHeads, MedusaShape, OutputHead
from paceline.methods.medusa_heads.layout import (
    FILE_NAME,
    is_medusa,
    store_target_head,
    write_medusa,
)
from paceline.methods.medusa_heads.vllm_layout import is_vllm, write_vllm
from paceline.target import Device

HIDDEN, VOCAB = 16, 37
TARGET = TargetFacts("f" * 64, "tiny", HIDDEN, VOCAB, 128)
ROWS = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """FasterDecoding's residual block: its parameters are `linear.weight` and `linear.bias`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + nn.functional.silu(self.linear(x))
        return out


def reference_heads(num_heads: int, num_layers: int) -> nn.ModuleList:
    """FasterDecoding's heads: one block, repeated, then a linear map without bias."""
    heads = nn.ModuleList()
    for _ in range(num_heads):
        block = Block()
        heads.append(nn.Sequential(*[block] * num_layers, nn.Linear(HIDDEN, VOCAB, bias=False)))
    return heads


@dataclass
class VllmConfig:
    """Fields of a vLLM Medusa configuration."""

    num_heads: int = 5
    num_hidden_layers: int = 1
    hidden_size: int = HIDDEN
    vocab_size: int = VOCAB
    truncated_vocab_size: int = VOCAB
    medusa_fc_bias: bool = False
    original_lm_head: bool = False


class Layers(nn.Module):
    """vLLM's residual block: layers with weights of their own, each `x + silu(layer(x))`."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(HIDDEN, HIDDEN, bias=config.medusa_fc_bias) for _ in range(config.num_hidden_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class VllmMedusa(nn.Module):
    """vLLM's heads, with the keys that its loader takes."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Layers(config) for _ in range(config.num_heads))
        rows = config.truncated_vocab_size
        if config.original_lm_head:
            self.lm_head = nn.Linear(HIDDEN, rows, bias=False)
        else:
            self.lm_heads = nn.ModuleList(
                nn.Linear(HIDDEN, rows, bias=False) for _ in range(config.num_heads)
            )
        self.token_map = None if rows == VOCAB else torch.randperm(VOCAB)[:rows]

    def forward(self, x: Tensor) -> Tensor:
        """`[n, num_heads, VOCAB]`, -inf where a token is not in the map."""
        columns = []
        for k, block in enumerate(self.blocks):
            head = self.lm_head if self.config.original_lm_head else self.lm_heads[k]
            logits = head(block(x))
            if self.token_map is not None:
                whole = torch.full((x.shape[0], VOCAB), -torch.inf)
                whole[:, self.token_map] = logits
                logits = whole
            columns.append(logits)
        return torch.stack(columns, dim=1)

    def save(self, directory: Path, prefix: str = "") -> None:
        tensors = {prefix + name: tensor for name, tensor in self.state_dict().items()}
        if self.token_map is not None:
            tensors["token_map"] = self.token_map
        directory.mkdir(exist_ok=True)
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(asdict(self.config)))


def ours(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    """Logits of our heads over the whole vocabulary."""
    shape = MedusaShape.from_config(config)
    heads = MedusaHeads(shape, tensors, None, Device.parse("cpu"), torch.float32)
    with torch.inference_mode():
        logits = heads.forward(ROWS, range(shape.num_heads))
    if "token_map" not in tensors:
        return logits
    whole = torch.full((*logits.shape[:2], VOCAB), -torch.inf)
    whole[..., tensors["token_map"]] = logits
    return whole


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("num_heads", "num_layers"), [(5, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_fasterdecoding_heads(num_heads: int, num_layers: int, prefix: str, tmp_path: Path) -> None:
    torch.manual_seed(num_heads)
    heads = reference_heads(num_heads, num_layers)
    tensors = {prefix + name: tensor.clone() for name, tensor in heads.state_dict().items()}
    if prefix:  # a Medusa-2 model: the target stands beside its heads
        tensors["model.norm.weight"] = torch.ones(HIDDEN)
    save_file(tensors, tmp_path / ("model.safetensors" if prefix else FILE_NAME))
    # As the authors' own checkpoints do, it names another number of heads.
    (tmp_path / "config.json").write_text(
        json.dumps({"medusa_num_heads": 7, "medusa_num_layers": num_layers})
    )
    config, found = read_public(tmp_path, TARGET, "medusa")
    assert config.method == ("medusa2" if prefix else "medusa1")
    assert (config.target_fingerprint, config.shape["num_heads"]) == (TARGET.fingerprint, num_heads)
    assert_same(ours(config, found), torch.stack([head(ROWS) for head in heads], dim=1))

    back = tmp_path / "back"
    write_medusa(back, config, found)
    assert json.loads((back / "config.json").read_text())["medusa_num_heads"] == num_heads
    again = reference_heads(num_heads, num_layers)
    again.load_state_dict(load_file(back / FILE_NAME))  # strict: every name, and no other
    assert_same(
        torch.stack([head(ROWS) for head in again], dim=1), torch.stack([h(ROWS) for h in heads], dim=1)
    )


def test_fasterdecoding_shards(tmp_path: Path) -> None:
    heads = reference_heads(2, 1)
    weight_map = {}
    for name, tensor in heads.state_dict().items():
        file = f"part-{name[0]}.safetensors"
        weight_map["medusa_head." + name] = file
        path = tmp_path / file
        known = load_file(path) if path.exists() else {}
        save_file({**known, "medusa_head." + name: tensor}, path)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config, found = read_public(tmp_path, TARGET, "medusa")
    assert_same(ours(config, found), torch.stack([head(ROWS) for head in heads], dim=1))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x"}}))
    with pytest.raises(CheckpointError, match="outside"):
        read_public(tmp_path, TARGET, "medusa")


@pytest.mark.parametrize(
    "config",
    [
        VllmConfig(),
        VllmConfig(num_heads=3, medusa_fc_bias=True),
        VllmConfig(num_heads=2, num_hidden_layers=2, medusa_fc_bias=True),
        VllmConfig(truncated_vocab_size=11),
        VllmConfig(num_heads=4, original_lm_head=True),
        VllmConfig(original_lm_head=True, truncated_vocab_size=9, medusa_fc_bias=True),
    ],
)
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm_heads(config: VllmConfig, prefix: str, tmp_path: Path) -> None:
    torch.manual_seed(config.num_heads)
    model = VllmMedusa(config)
    model.save(tmp_path, prefix)
    found_config, found = read_public(tmp_path, TARGET, "vllm")
    assert_same(ours(found_config, found), model(ROWS))

    back = tmp_path / "back"
    write_vllm(back, found_config, found)
    written = json.loads((back / "config.json").read_text())
    assert {name: written[name] for name in asdict(config)} == asdict(config)
    again = VllmMedusa(config)
    tensors = load_file(back / "model.safetensors")
    again.token_map = tensors.pop("token_map", None)
    again.load_state_dict(tensors)
    assert_same(again(ROWS), model(ROWS))


def test_whole_output_heads_beside_a_token_map_are_cut(tmp_path: Path) -> None:
    model = VllmMedusa(VllmConfig(num_heads=2, truncated_vocab_size=11))
    model.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert model.token_map is not None
    for k in range(2):
        whole = torch.zeros(VOCAB, HIDDEN)
        whole[model.token_map] = tensors[f"lm_heads.{k}.weight"]
        tensors[f"lm_heads.{k}.weight"] = whole
    save_file(tensors, tmp_path / "model.safetensors")
    config, found = read_public(tmp_path, TARGET, "vllm")
    assert_same(ours(config, found), model(ROWS))


def test_the_two_layouts_hold_the_same_heads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    heads = reference_heads(3, 1)
    save_file(dict(heads.state_dict()), tmp_path / FILE_NAME)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    config, tensors = read_public(tmp_path, TARGET, "medusa")
    write_vllm(tmp_path / "vllm", config, tensors)
    config, tensors = read_public(tmp_path / "vllm", TARGET, "vllm")
    write_medusa(tmp_path / "back", config, tensors)
    assert load_file(tmp_path / "back" / FILE_NAME).keys() == heads.state_dict().keys()
    for name, tensor in load_file(tmp_path / "back" / FILE_NAME).items():
        assert torch.equal(tensor, heads.state_dict()[name])


def test_heads_without_bias_and_with_one_output_head_become_fasterdecodings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = VllmMedusa(VllmConfig(num_heads=2, original_lm_head=True))
    model.save(tmp_path)
    config, tensors = read_public(tmp_path, TARGET, "vllm")
    write_medusa(tmp_path / "medusa", config, tensors)
    heads = reference_heads(2, 1)
    heads.load_state_dict(load_file(tmp_path / "medusa" / FILE_NAME))
    assert_same(torch.stack([head(ROWS) for head in heads], dim=1), model(ROWS))


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize("rows", [VOCAB, 9])
def test_the_targets_own_head_is_stored_for_readers_that_want_it(
    rows: int, target_dir: Path, tmp_path: Path
) -> None:
    """vLLM's `original_lm_head` without the weights means the target's; written back, the weights are there."""
    facts = TargetFacts.read(target_dir)
    assert (facts.hidden, facts.vocab, facts.max_positions) == (HIDDEN, VOCAB, 64)
    model = VllmMedusa(VllmConfig(original_lm_head=True, truncated_vocab_size=rows))
    head = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"].bfloat16().float()
    with torch.no_grad():
        model.lm_head.weight.copy_(head if model.token_map is None else head[model.token_map])
    expected = model(ROWS)
    model.save(tmp_path / "public")
    tensors = load_file(tmp_path / "public" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "public" / "model.safetensors")
    config, found = read_public(tmp_path / "public", facts, "vllm")
    assert config.shape["output"] == OutputHead.TARGET
    save_drafter(tmp_path / "own", config, found)
    assert load_drafter(tmp_path / "own", target_dir, dtype=torch.float32).method == "medusa1"
    for write in (write_vllm, write_medusa):
        with pytest.raises(CheckpointError, match=r"--target|whole vocabulary"):
            write(tmp_path / "refused", config, found)
    stored_config, stored = store_target_head(config, found, target_dir)
    assert_same(
        ours(stored_config, {k: v.float() if v.is_floating_point() else v for k, v in stored.items()}),
        expected,
    )
    write_vllm(tmp_path / "back", stored_config, stored)
    assert "lm_head.weight" in load_file(tmp_path / "back" / "model.safetensors")
    assert store_target_head(stored_config, stored, target_dir)[1].keys() == stored.keys()


def _medusa(path: Path, **changes: Tensor | None) -> Path:
    tensors: dict[str, Tensor | None] = {**reference_heads(2, 1).state_dict(), **changes}
    path.mkdir()
    save_file({k: v.clone() for k, v in tensors.items() if v is not None}, path / FILE_NAME)
    (path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    return path


def test_what_does_not_belong_to_fasterdecodings_layout_is_named(tmp_path: Path) -> None:
    wrong: dict[str, dict[str, Tensor | None]] = {
        r"1\.0\.linear\.bias is missing": {"1.0.linear.bias": None},
        r"0\.1\.weight is missing": {"0.1.weight": None},
        r"0\.1\.weight has shape": {"0.1.weight": torch.zeros(VOCAB + 1, HIDDEN)},
        r"0\.1\.extra is surplus": {"0.1.extra": torch.zeros(1)},
        r"2\.0\.linear\.bias is missing": {"3.0.linear.weight": torch.zeros(HIDDEN, HIDDEN)},
    }
    for number, (message, changes) in enumerate(wrong.items()):
        with pytest.raises(CheckpointError, match=message):
            read_public(_medusa(tmp_path / str(number), **changes), TARGET, "medusa")


def test_pickles_are_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80\x02.")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt is a pickle.*save_file"):
        read_public(tmp_path, TARGET, "medusa")
    with pytest.raises(CheckpointError, match="pickle"):
        read_public(tmp_path, TARGET, "vllm")
    (tmp_path / "medusa_lm_head.pt").unlink()
    with pytest.raises(CheckpointError, match="no safetensors"):
        read_public(tmp_path, TARGET, "medusa")


def test_what_does_not_belong_to_vllms_layout_is_named(tmp_path: Path) -> None:
    wrong: list[tuple[str, dict[str, Any], dict[str, Tensor | None]]] = [
        (r"blocks\.0\.layers\.0\.bias is surplus", {}, {"blocks.0.layers.0.bias": torch.zeros(HIDDEN)}),
        (r"blocks\.1\.layers\.0\.bias is missing", {"medusa_fc_bias": True}, {}),
        (r"lm_heads\.1\.weight is missing", {}, {"lm_heads.1.weight": None}),
        (r"lm_heads\.2\.weight is missing", {"num_heads": 3}, {}),
        ("token_map is missing", {"truncated_vocab_size": 5}, {}),
        ("token_map is surplus", {}, {"token_map": torch.arange(3)}),
        ("token_map does not name", {"truncated_vocab_size": 3}, {"token_map": torch.tensor([1, 1, 2])}),
        ("hidden_size is 17", {"hidden_size": 17}, {}),
        ("vocab_size is 38", {"vocab_size": 38}, {}),
        ("truncated_vocab_size is 99", {"truncated_vocab_size": 99}, {}),
        ("num_heads must be at most", {"num_heads": 99}, {}),
        ("num_heads must be a positive", {"num_heads": "5"}, {}),
        ("logit_scale", {"logit_scale": 0.5}, {}),
    ]
    for number, (message, fields, changes) in enumerate(wrong):
        path = tmp_path / str(number)
        VllmMedusa(VllmConfig(num_heads=2)).save(path)
        content = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**content, **fields}))
        tensors = {**load_file(path / "model.safetensors"), **changes}
        save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            read_public(path, TARGET, "vllm")
    for text in ("[]", "{"):
        (path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match="JSON"):
            read_public(path, TARGET, "vllm")


def test_each_layout_is_told_by_its_configuration(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(dict(reference_heads(2, 1).state_dict()), tmp_path / FILE_NAME)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    config, tensors = read_public(tmp_path, TARGET, "medusa")
    for write, name in ((write_medusa, "medusa"), (write_vllm, "vllm")):
        write(tmp_path / name, config, tensors)
        content = json.loads((tmp_path / name / "config.json").read_text())
        assert (is_medusa(content), is_vllm(content)) == (name == "medusa", name == "vllm")


def test_values_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    broken = torch.full((VOCAB, HIDDEN), torch.nan)
    with pytest.raises(CheckpointError, match=r"1\.1\.weight holds values"):
        read_public(_medusa(tmp_path / "medusa", **{"1.1.weight": broken}), TARGET, "medusa")
    VllmMedusa(VllmConfig(num_heads=2)).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_heads.1.weight": broken}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_heads\.1\.weight holds values"):
        read_public(tmp_path, TARGET, "vllm")


def test_layouts_that_cannot_hold_heads_say_so(tmp_path: Path) -> None:
    VllmMedusa(VllmConfig(num_heads=2, truncated_vocab_size=7)).save(tmp_path / "reduced")
    config, tensors = read_public(tmp_path / "reduced", TARGET, "vllm")
    with pytest.raises(CheckpointError, match="whole vocabulary"):
        write_medusa(tmp_path / "out", config, tensors)
    VllmMedusa(VllmConfig(num_heads=2, num_hidden_layers=2)).save(tmp_path / "layers")
    config, tensors = read_public(tmp_path / "layers", TARGET, "vllm")
    with pytest.raises(CheckpointError, match="repeats one block"):
        write_medusa(tmp_path / "out", config, tensors)
    del tensors["blocks.0.layers.1.weight"]
    for write in (write_vllm, write_medusa):
        with pytest.raises(CheckpointError, match=r"blocks\.0\.layers\.1\.weight is missing"):
            write(tmp_path / "out", config, tensors)
    assert not (tmp_path / "out").exists()
