"""Multi-token prediction in the speculators format: there and back, refusals, and the package itself where it is."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoints import export_checkpoint, import_checkpoint
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, read_all_tensors, save_drafter
from paceline.methods.deepseek_mtp.layer import parameter_shapes
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.models import model_fingerprint
from tests.methods.conftest import MTP_SHAPE, target_dir  # noqa: F401  a fixture

SHAPE = replace(MTP_SHAPE, carries_norm=True)


def save(path: Path, target: Path, **changes: object) -> tuple[Path, dict[str, Tensor]]:
    """A random module with norms of queries and keys."""
    content = {**asdict(SHAPE), "head_norms": True, "max_positions": 64, **changes}
    config = DrafterConfig("deepseek_mtp", model_fingerprint(target), "tiny", content)
    random = torch.Generator().manual_seed(6)
    tensors = {
        name: 1.0 + 0.2 * torch.randn(size, generator=random)
        if len(size) == 1
        else torch.randn(size, generator=random) * 1.5 * size[1] ** -0.5
        for name, size in parameter_shapes(config).items()
    }
    save_drafter(path, config, tensors)
    return path, tensors


def test_there_and_back(target_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    own, tensors = save(tmp_path / "own", target_dir)
    export_checkpoint(own, "speculators", tmp_path / "public", target_dir)
    stored = load_file(tmp_path / "public" / "model.safetensors")
    assert len(stored) == len(tensors)
    assert torch.equal(stored["mtp_layers.0.input_proj.weight"], tensors["layers.0.eh_proj.weight"])
    assert torch.equal(stored["mtp_layers.0.token_layernorm.weight"], tensors["layers.0.enorm.weight"])
    content = json.loads((tmp_path / "public" / "config.json").read_text())
    assert content["speculators_model_type"] == "mtp"
    # The package does not store embedding and head; who does has the target's.
    save_file({**stored, "lm_head.weight": torch.zeros(97, 64)}, tmp_path / "public" / "model.safetensors")
    config = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "back")
    before = DrafterConfig.read(own).shape
    assert {k: v for k, v in config.shape.items() if before.get(k) != v} == {}
    back = read_all_tensors(tmp_path / "back")
    assert set(back) == set(tensors)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_one_module_need_not_be_counted(target_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    own, _ = save(tmp_path / "own", target_dir)
    content = json.loads((own / "config.json").read_text())
    del content["shape"]["num_modules"]
    (own / "config.json").write_text(json.dumps(content))
    load_drafter(own, target_dir, dtype=torch.float32)
    export_checkpoint(own, "speculators", tmp_path / "public")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_modules": 2}, "num_modules"),
        ({"carries_norm": False}, "carries_norm"),
        ({"head_norms": False}, "head_norms"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"reads_residual": True}, "reads_residual"),
    ],
)
def test_what_the_format_cannot_say_is_named(
    changes: dict[str, object],
    words: str,
    target_dir: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    own, _ = save(tmp_path / "own", target_dir, **changes)
    with pytest.raises(CheckpointError, match=f"shape.{words}"):
        export_checkpoint(own, "speculators", tmp_path / "public")


@pytest.mark.parametrize(
    ("outer", "inner", "words"),
    [
        ({"num_nextn_predict_layers": 2}, {}, "num_nextn_predict_layers must be 1"),
        ({}, {"model_type": "llama"}, "qwen3 alone"),
        ({}, {"hidden_size": 32}, "it is another's"),
        ({}, {"num_key_value_heads": 3}, "no multiple"),
        ({}, {"intermediate_size": 40}, "mlp.*has shape"),
    ],
)
def test_what_cannot_be_served_is_named(
    outer: dict[str, Any],
    inner: dict[str, Any],
    words: str,
    target_dir: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    own, _ = save(tmp_path / "own", target_dir)
    export_checkpoint(own, "speculators", tmp_path / "public")
    path = tmp_path / "public" / "config.json"
    content = json.loads(path.read_text())
    layer = {**content["transformer_layer_config"], **inner}
    path.write_text(json.dumps({**content, **outer, "transformer_layer_config": layer}))
    with pytest.raises(CheckpointError, match=words):
        import_checkpoint(tmp_path / "public", target_dir, tmp_path / "back")


@pytest.mark.filterwarnings("ignore")
def test_the_package_computes_the_same(target_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """Its first step over a text is our first draft at every position; see `test_speculators_package.py`."""
    pytest.importorskip("speculators", reason="the package speculators is not installed")
    from speculators.models.mtp import MTPDraftModel
    from speculators.models.mtp.config import MTPSpeculatorConfig

    own, _ = save(tmp_path / "own", target_dir)
    export_checkpoint(own, "speculators", tmp_path / "public")
    content = json.loads((tmp_path / "public" / "config.json").read_text())
    model = MTPDraftModel(MTPSpeculatorConfig(**content)).float().eval()
    missing, surplus = model.load_state_dict(
        load_file(tmp_path / "public" / "model.safetensors"), strict=False
    )
    assert not surplus
    assert not [name for name in missing if name.startswith("mtp_layers")]
    random = torch.Generator().manual_seed(1)
    table = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]
    states, tokens = torch.randn(12, 64, generator=random), torch.randint(3, 97, (13,), generator=random)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.copy_(table)
        padded = torch.cat((states, torch.zeros(1, 64)))[None]
        logits = model(input_ids=tokens[None], hidden_states=padded)[0][0][0]
    assert len(logits) >= 8
    drafter = load_drafter(own, target_dir, dtype=torch.float32)
    for row, expected in enumerate(logits.log_softmax(-1)):
        drafter.open(row, tokens[: row + 2].tolist())
        drafter.feed(row, 0, states[: row + 1])
        (entry,) = drafter.draft([DraftRequest(row, 1)])
        assert entry is not None
        assert entry.tokens[0] == int(expected.argmax())
        assert entry.log_probs[0] == pytest.approx(float(expected.max()), abs=1e-4)
