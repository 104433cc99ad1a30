"""Draft layers on the CPU kernels: near to the torch form, and the same through rejections, in company and in trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from paceline.cpu import kernels
from paceline.cpu.draft_layer import NativeLayer, takes_layer
from paceline.draft_layer import LayerWeights, Rows
from paceline.draft_layer.torch_layer import TorchLayer
from paceline.methods.autoregressive.drafter import AutoregressiveDrafter
from paceline.methods.checkpoint import DrafterConfig, load_tensors
from paceline.methods.deepseek_mtp import layer as deepseek_mtp
from paceline.methods.deepseek_mtp.drafter import DeepseekMtpDrafter
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.methods.eagle import feature_layer as eagle1
from paceline.methods.eagle import fused_layer as eagle3
from paceline.methods.eagle1.drafter import Eagle1Drafter
from paceline.methods.eagle2.drafter import Eagle2Drafter
from paceline.methods.eagle3.drafter import Eagle3Drafter
from paceline.methods.loading import load_drafter
from paceline.methods.p_eagle.drafter import PEagleDrafter
from paceline.methods.p_eagle.objective import PEagleShape
from paceline.methods.target_vocabulary import SharedVocabulary
from paceline.models import model_fingerprint
from paceline.target import Device
from paceline.target.kv.cache import KVCache
from paceline.target.kv.slot import KVLayout
from tests.methods.native import (
    VOCAB,
    WIDTH,
    draft_one,
    random_features,
    random_text,
    save_eagle3,
    save_random,
    save_target,
)
from tests.methods.p_eagle_checkpoint import MASK_TOKEN, random_tensors, save

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="the CPU kernels do not run here")

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
EAGLE1 = {
    "plain": {"fc_bias": True},
    "no bias": {"fc_bias": False},
    "attention bias": {"fc_bias": True, "qkv_bias": True},
    "scaled positions": {"fc_bias": True, "rope_parameters": LINEAR_ROPE},
}
DEEPSEEK_MTP = {
    "raw": {"carries_norm": False},
    "normed": {"carries_norm": True},
    "attention bias": {"carries_norm": False, "qkv_bias": True},
    "head norms": {"carries_norm": True, "head_norms": True},
    "scaled positions": {"carries_norm": False, "rope_parameters": LINEAR_ROPE},
}
DRAFT_IDS = list(range(3, 53))
P_EAGLE = PEagleShape(
    hidden=WIDTH,
    target_hidden=WIDTH,
    num_taps=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate=96,
    draft_vocab=50,
    target_vocab=VOCAB,
    rope_theta=10000.0,
    rms_eps=1e-5,
    num_layers=3,
    num_depths=6,
    mask_token=MASK_TOKEN,
)
# What P-EAGLE and public EAGLE-3 checkpoints add to the layer.
EAGLE3: list[dict[str, object]] = [
    {},
    {"num_layers": 3},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"head_norms": True, "num_layers": 2},
    {"num_layers": 2, "norm_before_residual": True, "norm_output": True, "has_embedding": True},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}},
]


def assert_near_to_torch(weights: LayerWeights) -> None:
    """Both forms of a layer give nearly the same for a prefix of two sequences and for a tree behind one of them."""
    assert takes_layer(weights, Device("cpu"))
    outputs = []
    with torch.inference_mode():
        for layer in (NativeLayer(weights), TorchLayer(weights, Device("cpu"))):
            layout = KVLayout(len(weights.blocks), 2, 32, torch.bfloat16, torch.device("cpu"))
            cache = KVCache(layout)
            slots = [cache.get(cache.open(64)) for _ in range(2)]
            first = [
                Rows(slot, random_text(9 + i, i), random_features(9 + i, i), range(9 + i))
                for i, slot in enumerate(slots)
            ]
            prefix = layer.forward(first, [8, 18])
            assert [slot.num_pending for slot in slots] == [9, 10]
            for slot, rows in zip(slots, first, strict=True):
                slot.length, slot.num_pending = rows.num_rows, 0
            tree = Rows(slots[1], [4, 5, 6], prefix.states[16:], [10, 10, 11], [[0], [1], [0, 2]], [1, 1, 2])
            nodes = layer.forward([tree], range(3))
            outputs.append((prefix.states, prefix.logits, nodes.states, nodes.logits))
            log_probs, ids = nodes.best(5)
            expected = nodes.logits.log_softmax(-1).topk(5, dim=-1)
            assert ids == expected.indices.tolist()
            torch.testing.assert_close(torch.tensor(log_probs), expected.values, rtol=1e-5, atol=1e-5)
    for native, plain in zip(*outputs, strict=True):
        error = (native.float() - plain.float()).square().mean().sqrt()
        assert error < 0.02 * plain.float().square().mean().sqrt()


def shared_vocabulary() -> SharedVocabulary:
    """A random embedding and a random head."""
    random = torch.Generator().manual_seed(2)
    return SharedVocabulary(*torch.randn(2, VOCAB, WIDTH, generator=random).bfloat16(), None)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a head of its own."""
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("variant", EAGLE1)
def test_eagle1_is_near_to_the_torch_form(target_dir: Path, tmp_path: Path, variant: str) -> None:
    path = save_random(tmp_path, target_dir, "eagle1", EAGLE1[variant], eagle1.parameter_shapes)
    config = DrafterConfig.read(path)
    tensors = load_tensors(path, eagle1.parameter_shapes(config))
    assert_near_to_torch(eagle1.read_layer(config, tensors, shared_vocabulary(), torch.bfloat16))


@pytest.mark.parametrize("variant", DEEPSEEK_MTP)
def test_a_prediction_module_is_near_to_the_torch_form(
    target_dir: Path, tmp_path: Path, variant: str
) -> None:
    shapes = deepseek_mtp.parameter_shapes
    path = save_random(tmp_path, target_dir, "deepseek_mtp", DEEPSEEK_MTP[variant], shapes)
    config = DrafterConfig.read(path)
    tensors = load_tensors(path, shapes(config))
    (weights,) = deepseek_mtp.read_modules(config, tensors, shared_vocabulary(), torch.bfloat16)
    assert_near_to_torch(weights)


@pytest.mark.parametrize("variant", EAGLE3, ids=lambda variant: "-".join(variant) or "plain")
def test_eagle3_with_variants_is_near_to_the_torch_form(variant: dict[str, object]) -> None:
    sizes = {name: getattr(P_EAGLE, name) for name in PEagleShape.__dataclass_fields__ if name != "num_taps"}
    sizes |= {"tap_layers": [0, 1, 2], "max_positions": 256, "num_layers": 1, **variant}
    config = DrafterConfig("eagle3", "", "", sizes)
    random = torch.Generator().manual_seed(7)
    tensors = {}
    for name, size in eagle3.parameter_shapes(config).items():
        values = torch.randn(size, generator=random)
        tensors[name] = (1.0 + 0.2 * values if len(size) == 1 else values * 1.5 * size[-1] ** -0.5).bfloat16()
    embedding = random_features(VOCAB, 2)
    assert_near_to_torch(eagle3.read_layer(config, tensors, embedding, torch.bfloat16))


def test_eagle3_is_near_to_the_torch_form(tmp_path: Path) -> None:
    path, _ = save_eagle3(tmp_path / "drafter", tmp_path / "target")
    config = DrafterConfig.read(path)
    tensors = load_tensors(path, eagle3.parameter_shapes(config))
    embedding = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert_near_to_torch(eagle3.read_layer(config, tensors, embedding, torch.bfloat16))


Load = Callable[[], Drafter]

CLASSES: dict[str, type[AutoregressiveDrafter | PEagleDrafter]] = {
    "eagle1": Eagle1Drafter,
    "eagle2": Eagle2Drafter,
    "eagle3": Eagle3Drafter,
    "deepseek_mtp": DeepseekMtpDrafter,
    "p_eagle": PEagleDrafter,
}
DRAFTERS: dict[str, tuple[str, Mapping[str, object], int]] = {
    "eagle1": ("eagle1", EAGLE1["plain"], 12),
    "eagle2": ("eagle2", EAGLE1["plain"], 12),
    "deepseek_mtp raw": ("deepseek_mtp", DEEPSEEK_MTP["raw"], 12),
    "deepseek_mtp normed": ("deepseek_mtp", DEEPSEEK_MTP["normed"], 12),
    "eagle3": ("eagle3", {}, 9),
    "p_eagle": ("p_eagle", {}, 9),
}
"""By name: the method, its variant, and nodes of a tree."""


def save_p_eagle(path: Path, target_dir: Path) -> Path:
    """A random drafter, and its random target, with widths that the kernels take."""
    save_target(target_dir, num_hidden_layers=4, tie_word_embeddings=True, initializer_range=0.02)
    tensors = random_tensors(P_EAGLE, DRAFT_IDS, seed=5)
    tensors = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    save(path, P_EAGLE, tensors, model_fingerprint(target_dir), [0, 1, 2], 512)
    return path


@pytest.fixture(scope="module", params=DRAFTERS)
def name(request: pytest.FixtureRequest) -> str:
    """Of a drafter."""
    return str(request.param)


@pytest.fixture(scope="module")
def load(name: str, tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads a random drafter, whose layer runs on the kernels."""
    method, variant, _ = DRAFTERS[name]
    path, own_target = tmp_path_factory.mktemp("drafter"), tmp_path_factory.mktemp("target")
    if method == "eagle3":
        save_eagle3(path, own_target)
    elif method == "p_eagle":
        save_p_eagle(path, own_target)
    else:
        shapes = (deepseek_mtp if method == "deepseek_mtp" else eagle1).parameter_shapes
        save_random(path, save_target(own_target), method, variant, shapes)

    def load_it() -> Drafter:
        drafter = load_drafter(path, own_target, dtype=torch.bfloat16)
        assert isinstance(drafter, CLASSES[method])
        assert isinstance(drafter._layer, NativeLayer)
        return drafter

    return load_it


@pytest.mark.parametrize("accepted", [0, 2, 4])
@pytest.mark.parametrize("is_tree", [False, True])
def test_after_a_verification_equals_a_fresh_drafter(
    load: Load, name: str, accepted: int, is_tree: bool
) -> None:
    max_nodes = DRAFTERS[name][2] if is_tree else 0
    text, features = random_text(40, 1), random_features(40, 1)
    drafter, fresh = load(), load()
    drafter.open(1, text[:20])
    drafter.feed(1, 0, features[:19])
    draft_one(drafter, 1, 4, max_nodes)
    end = 20 + accepted + 1
    drafter.extend(1, 20, text[20:end])
    drafter.feed(1, 19, features[19 : end - 1])
    fresh.open(1, text[:end])
    fresh.feed(1, 0, features[: end - 1])
    assert draft_one(drafter, 1, 4, max_nodes) == draft_one(fresh, 1, 4, max_nodes)


@pytest.mark.parametrize("is_tree", [False, True])
def test_neither_company_nor_earlier_requests_show(load: Load, name: str, is_tree: bool) -> None:
    max_nodes = DRAFTERS[name][2] if is_tree else 0
    num_tokens = 6 if name == "p_eagle" else 5
    together, alone, asked_before = load(), load(), load()
    expected = []
    for sequence_id, length in enumerate((5, 12, 30)):
        for drafter in (together, alone, asked_before):
            drafter.open(sequence_id, random_text(length, sequence_id))
            drafter.feed(sequence_id, 0, random_features(length - 1, sequence_id))
        expected.append(draft_one(alone, sequence_id, num_tokens, max_nodes))
    requests = [DraftRequest(i, num_tokens, max_nodes) for i in range(3)]
    assert together.draft(requests) == expected
    if name == "p_eagle":
        asked_before.draft([DraftRequest(0, 2), DraftRequest(2, 4)])
        assert asked_before.draft(requests) == expected


def test_mask_rows_are_near_to_the_torch_form(tmp_path: Path) -> None:
    path = save_p_eagle(tmp_path / "drafter", tmp_path / "target")
    logits = []
    for dtype, form in ((torch.bfloat16, NativeLayer), (torch.float32, TorchLayer)):
        drafter = load_drafter(path, tmp_path / "target", dtype=dtype)
        assert isinstance(drafter, PEagleDrafter)
        assert isinstance(drafter._layer, form)
        drafter.open(1, random_text(20, 1))
        drafter.feed(1, 0, random_features(19, 1))
        draft_one(drafter, 1, 6)
        logits.append(drafter._sequences[1].round.logits(0, 6))
    native, plain = logits
    assert (native - plain).square().mean().sqrt() < 0.03 * plain.square().mean().sqrt()
