"""The EAGLE-1 layer on the CPU kernels: near to the torch form, and the same through rejections, batches and trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.drafters import DraftRequest, load_drafter
from paceline.drafters.checkpoint import DrafterConfig, load_tensors, save_drafter
from paceline.drafters.draft_layer import Rows
from paceline.drafters.eagle1 import Eagle1Drafter
from paceline.drafters.eagle1_layer import Eagle1Layer, LayerWeights, parameter_shapes
from paceline.drafters.eagle1_native import NativeEagle1Layer
from paceline.drafters.target_vocabulary import SharedVocabulary
from paceline.models import model_fingerprint
from paceline.target import Device, kernels
from paceline.target.kv_cache import KVCache, KVLayout
from paceline.trie import DraftEntry

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="the CPU kernels do not run here")

VOCAB, WIDTH = 97, 64
SHAPE = {
    "hidden": WIDTH,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,  # not hidden / heads
    "intermediate": 96,
    "target_vocab": VOCAB,
    "max_positions": 512,
    "rms_eps": 1e-5,
}
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
    path = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def checkpoint(target_dir: Path, path: Path, variant: str, method: str = "eagle1") -> Path:
    config = DrafterConfig(method, model_fingerprint(target_dir), "tiny", SHAPE | VARIANTS[variant])
    random = torch.Generator().manual_seed(5)
    tensors = {}
    for name, size in parameter_shapes(config).items():
        values = torch.randn(size, generator=random)
        is_norm = name.endswith("norm.weight")
        tensors[name] = (1.0 + 0.2 * values if is_norm else values * size[-1] ** -0.5).bfloat16()
    save_drafter(path, config, tensors)
    return path


@pytest.fixture(scope="module", params=["eagle1", "eagle2"])
def drafter_dir(
    request: pytest.FixtureRequest, target_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return checkpoint(target_dir, tmp_path_factory.mktemp("drafter"), "plain", request.param)


def _load(drafter_dir: Path, target_dir: Path) -> Eagle1Drafter:
    drafter = load_drafter(drafter_dir, target_dir, dtype=torch.bfloat16)
    assert isinstance(drafter, Eagle1Drafter)
    assert isinstance(drafter._layer, NativeEagle1Layer)
    return drafter


def _features(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _text(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _draft(drafter: Eagle1Drafter, sequence_id: int, num_tokens: int, max_nodes: int = 0) -> DraftEntry:
    (entry,) = drafter.draft([DraftRequest(sequence_id, num_tokens, max_nodes)])
    assert entry is not None
    return entry


@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_is_near_to_the_torch_form(target_dir: Path, tmp_path: Path, variant: str) -> None:
    path = checkpoint(target_dir, tmp_path, variant)
    config = DrafterConfig.read(path)
    tensors = load_tensors(path, parameter_shapes(config))
    random = torch.Generator().manual_seed(2)
    embedding, head = torch.randn(2, VOCAB, WIDTH, generator=random).bfloat16()
    weights = LayerWeights.read(config, tensors, SharedVocabulary(embedding, head, None), torch.bfloat16)
    outputs = []
    with torch.inference_mode():
        for layer in (NativeEagle1Layer(weights), Eagle1Layer(weights, Device("cpu"))):
            cache = KVCache(KVLayout(1, 2, 32, torch.bfloat16, torch.device("cpu")))
            slots = [cache.get(cache.open(64)) for _ in range(2)]
            first = [
                Rows(slot, _text(9 + i, i), _features(9 + i, i), range(9 + i)) for i, slot in enumerate(slots)
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
    text, features = _text(40, 1), _features(40, 1)
    drafter, fresh = _load(drafter_dir, target_dir), _load(drafter_dir, target_dir)
    drafter.open(1, text[:20])
    drafter.feed(1, 0, features[:19])
    _draft(drafter, 1, 4, max_nodes)
    end = 20 + accepted + 1
    drafter.extend(1, 20, text[20:end])
    drafter.feed(1, 19, features[19 : end - 1])
    fresh.open(1, text[:end])
    fresh.feed(1, 0, features[: end - 1])
    assert _draft(drafter, 1, 4, max_nodes) == _draft(fresh, 1, 4, max_nodes)


@pytest.mark.parametrize("max_nodes", [0, 12])
def test_company_does_not_show(drafter_dir: Path, target_dir: Path, max_nodes: int) -> None:
    together, alone = _load(drafter_dir, target_dir), _load(drafter_dir, target_dir)
    expected = []
    for sequence_id, length in enumerate((5, 12, 30)):
        for drafter in (together, alone):
            drafter.open(sequence_id, _text(length, sequence_id))
            drafter.feed(sequence_id, 0, _features(length - 1, sequence_id))
        expected.append(_draft(alone, sequence_id, 5, max_nodes))
    assert together.draft([DraftRequest(i, 5, max_nodes) for i in range(3)]) == expected
