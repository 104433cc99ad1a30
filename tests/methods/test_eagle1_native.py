"""The EAGLE-1 layer on the CPU kernels: near to the torch form, and the same through rejections, batches and trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.cpu import kernels
from paceline.cpu.draft_layer import NativeLayer
from paceline.draft_layer import Rows
from paceline.draft_layer.torch_layer import TorchLayer
from paceline.methods.checkpoint import DrafterConfig, load_tensors
from paceline.methods.drafter import DraftRequest
from paceline.methods.eagle1.drafter import Eagle1Drafter
from paceline.methods.eagle1.layer import parameter_shapes, read_layer
from paceline.methods.loading import load_drafter
from paceline.methods.target_vocabulary import SharedVocabulary
from paceline.target import Device
from paceline.target.kv_cache import KVCache
from paceline.target.kv_slot import KVLayout
from tests.methods.native import (
    VOCAB,
    WIDTH,
    draft_one,
    random_features,
    random_text,
    save_random,
    save_target,
)

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="the CPU kernels do not run here")

VARIANTS = {
    "plain": {"fc_bias": True},
    "no bias": {"fc_bias": False},
    "attention bias": {"fc_bias": True, "qkv_bias": True},
    "scaled positions": {
        "fc_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    },
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a head of its own."""
    return save_target(tmp_path_factory.mktemp("target"))


def checkpoint(target_dir: Path, path: Path, variant: str, method: str = "eagle1") -> Path:
    return save_random(path, target_dir, method, VARIANTS[variant], parameter_shapes)


@pytest.fixture(scope="module", params=["eagle1", "eagle2"])
def drafter_dir(
    request: pytest.FixtureRequest, target_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return checkpoint(target_dir, tmp_path_factory.mktemp("drafter"), "plain", request.param)


def _load(drafter_dir: Path, target_dir: Path) -> Eagle1Drafter:
    drafter = load_drafter(drafter_dir, target_dir, dtype=torch.bfloat16)
    assert isinstance(drafter, Eagle1Drafter)
    assert isinstance(drafter._layer, NativeLayer)
    return drafter


@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_is_near_to_the_torch_form(target_dir: Path, tmp_path: Path, variant: str) -> None:
    path = checkpoint(target_dir, tmp_path, variant)
    config = DrafterConfig.read(path)
    tensors = load_tensors(path, parameter_shapes(config))
    random = torch.Generator().manual_seed(2)
    embedding, head = torch.randn(2, VOCAB, WIDTH, generator=random).bfloat16()
    weights = read_layer(config, tensors, SharedVocabulary(embedding, head, None), torch.bfloat16)
    outputs = []
    with torch.inference_mode():
        for layer in (NativeLayer(weights), TorchLayer(weights, Device("cpu"))):
            cache = KVCache(KVLayout(1, 2, 32, torch.bfloat16, torch.device("cpu")))
            slots = [cache.get(cache.open(64)) for _ in range(2)]
            first = [
                Rows(slot, random_text(9 + i, i), random_features(9 + i, i), range(9 + i))
                for i, slot in enumerate(slots)
            ]
            prefix = layer.forward(first, [8, 18])
            for slot, rows in zip(slots, first, strict=True):
                slot.length, slot.num_pending = rows.num_rows, 0
            tree = Rows(slots[1], [4, 5, 6], prefix.states[16:], [10, 10, 11], [[0], [1], [0, 2]])
            nodes = layer.forward([tree], range(3))
            outputs.append((prefix.states, prefix.logits, nodes.states, nodes.logits))
            log_probs, ids = nodes.best(5)
            expected = nodes.logits.log_softmax(-1).topk(5, dim=-1)
            assert ids == expected.indices.tolist()
            torch.testing.assert_close(torch.tensor(log_probs), expected.values, rtol=1e-5, atol=1e-5)
    for native, plain in zip(*outputs, strict=True):
        error = (native.float() - plain.float()).square().mean().sqrt()
        assert error < 0.02 * plain.float().square().mean().sqrt()


@pytest.mark.parametrize("accepted", [0, 2, 4])
@pytest.mark.parametrize("max_nodes", [0, 12])
def test_after_a_verification_equals_a_fresh_drafter(
    drafter_dir: Path, target_dir: Path, accepted: int, max_nodes: int
) -> None:
    text, features = random_text(40, 1), random_features(40, 1)
    drafter, fresh = _load(drafter_dir, target_dir), _load(drafter_dir, target_dir)
    drafter.open(1, text[:20])
    drafter.feed(1, 0, features[:19])
    draft_one(drafter, 1, 4, max_nodes)
    end = 20 + accepted + 1
    drafter.extend(1, 20, text[20:end])
    drafter.feed(1, 19, features[19 : end - 1])
    fresh.open(1, text[:end])
    fresh.feed(1, 0, features[: end - 1])
    assert draft_one(drafter, 1, 4, max_nodes) == draft_one(fresh, 1, 4, max_nodes)


@pytest.mark.parametrize("max_nodes", [0, 12])
def test_company_does_not_show(drafter_dir: Path, target_dir: Path, max_nodes: int) -> None:
    together, alone = _load(drafter_dir, target_dir), _load(drafter_dir, target_dir)
    expected = []
    for sequence_id, length in enumerate((5, 12, 30)):
        for drafter in (together, alone):
            drafter.open(sequence_id, random_text(length, sequence_id))
            drafter.feed(sequence_id, 0, random_features(length - 1, sequence_id))
        expected.append(draft_one(alone, sequence_id, 5, max_nodes))
    assert together.draft([DraftRequest(i, 5, max_nodes) for i in range(3)]) == expected
