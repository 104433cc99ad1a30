"""EAGLE-3's layer with what P-EAGLE and public checkpoints add, on the CPU kernels: near to the torch form, exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.cpu import kernels
from paceline.cpu.draft_layer import NativeLayer, takes_layer
from paceline.draft_layer import Rows
from paceline.draft_layer.torch_layer import TorchLayer
from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.drafter import DraftRequest
from paceline.methods.eagle3.layer import parameter_shapes, read_layer
from paceline.methods.loading import load_drafter
from paceline.methods.p_eagle.drafter import PEagleDrafter
from paceline.methods.p_eagle.objective import PEagleShape
from paceline.models import model_fingerprint
from paceline.target import Device
from paceline.target.kv_cache import KVCache
from paceline.target.kv_slot import KVLayout
from tests.methods.native import VOCAB, WIDTH, draft_one, random_text, save_target
from tests.methods.p_eagle_checkpoint import MASK_TOKEN, random_tensors, save

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="the CPU kernels do not run here")

DRAFT_IDS = list(range(3, 53))
SHAPE = PEagleShape(
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
VARIANTS = [
    {},
    {"num_layers": 3},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"head_norms": True, "num_layers": 2},
    {"num_layers": 2, "norm_before_residual": True, "norm_output": True, "has_embedding": True},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}},
]


def _random(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v) or "plain")
def test_layer_is_near_to_the_torch_form(variant: dict[str, object]) -> None:
    sizes = {name: getattr(SHAPE, name) for name in PEagleShape.__dataclass_fields__ if name != "num_taps"}
    sizes |= {"tap_layers": [0, 1, 2], "max_positions": 256, "num_layers": 1, **variant}
    config = DrafterConfig("eagle3", "", "", sizes)
    random = torch.Generator().manual_seed(7)
    tensors = {}
    for name, size in parameter_shapes(config).items():
        values = torch.randn(size, generator=random)
        tensors[name] = (1.0 + 0.2 * values if len(size) == 1 else values * 1.5 * size[-1] ** -0.5).bfloat16()
    weights = read_layer(config, tensors, _random(VOCAB, WIDTH, 2), torch.bfloat16)
    assert takes_layer(weights, Device("cpu"))
    outputs = []
    with torch.inference_mode():
        for layer in (NativeLayer(weights), TorchLayer(weights, Device("cpu"))):
            layout = KVLayout(int(str(sizes["num_layers"])), 2, 32, torch.bfloat16, torch.device("cpu"))
            cache = KVCache(layout)
            slots = [cache.get(cache.open(64)) for _ in range(2)]
            parts = [
                Rows(slot, random_text(9 + i, i), _random(9 + i, WIDTH, i), range(9 + i))
                for i, slot in enumerate(slots)
            ]
            prefix = layer.forward(parts, [8, 18])
            assert [slot.num_pending for slot in slots] == [9, 10]
            for slot, part in zip(slots, parts, strict=True):
                slot.length, slot.num_pending = part.num_rows, 0
            tree = Rows(slots[1], [4, 5, 6], prefix.states[16:], [10, 10, 11], [[0], [1], [0, 2]])
            nodes = layer.forward([tree], range(3))
            outputs.append((prefix.states, prefix.logits, nodes.states, nodes.logits))
    for native, plain in zip(*outputs, strict=True):
        error = (native.float() - plain.float()).square().mean().sqrt()
        assert error < 0.02 * plain.float().square().mean().sqrt()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random drafter and its random target, with widths that the kernels take."""
    target_dir, drafter_dir = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    save_target(target_dir, num_hidden_layers=4, tie_word_embeddings=True, initializer_range=0.02)
    tensors = random_tensors(SHAPE, DRAFT_IDS, seed=5)
    tensors = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    save(drafter_dir, SHAPE, tensors, model_fingerprint(target_dir), [0, 1, 2], 512)
    return drafter_dir, target_dir


def _load(checkpoint: tuple[Path, Path], dtype: torch.dtype = torch.bfloat16) -> PEagleDrafter:
    drafter = load_drafter(checkpoint[0], checkpoint[1], dtype=dtype)
    assert isinstance(drafter, PEagleDrafter)
    assert isinstance(drafter._layer, NativeLayer if dtype == torch.bfloat16 else TorchLayer)
    return drafter


def test_mask_rows_are_near_to_the_torch_form(checkpoint: tuple[Path, Path]) -> None:
    logits = []
    for dtype in (torch.bfloat16, torch.float32):
        drafter = _load(checkpoint, dtype)
        drafter.open(1, random_text(20, 1))
        drafter.feed(1, 0, _random(19, WIDTH, 1))
        draft_one(drafter, 1, 6)
        logits.append(drafter._sequences[1].round.logits(0, 6))
    native, plain = logits
    assert (native - plain).square().mean().sqrt() < 0.03 * plain.square().mean().sqrt()


@pytest.mark.parametrize("accepted", [0, 2, 4])
@pytest.mark.parametrize("max_nodes", [0, 9])
def test_after_a_verification_equals_a_fresh_drafter(
    checkpoint: tuple[Path, Path], accepted: int, max_nodes: int
) -> None:
    text, features = random_text(40, 1), _random(40, WIDTH, 1)
    drafter, fresh = _load(checkpoint), _load(checkpoint)
    drafter.open(1, text[:20])
    drafter.feed(1, 0, features[:19])
    draft_one(drafter, 1, 4, max_nodes)
    end = 20 + accepted + 1
    drafter.extend(1, 20, text[20:end])
    drafter.feed(1, 19, features[19 : end - 1])
    fresh.open(1, text[:end])
    fresh.feed(1, 0, features[: end - 1])
    assert draft_one(drafter, 1, 4, max_nodes) == draft_one(fresh, 1, 4, max_nodes)


def test_neither_company_nor_earlier_wishes_show(checkpoint: tuple[Path, Path]) -> None:
    together, alone = _load(checkpoint), _load(checkpoint)
    expected = []
    for sequence_id, length in enumerate((5, 12, 30)):
        for drafter in (together, alone):
            drafter.open(sequence_id, random_text(length, sequence_id))
            drafter.feed(sequence_id, 0, _random(length - 1, WIDTH, sequence_id))
        expected.append(draft_one(alone, sequence_id, 6))
    together.draft([DraftRequest(0, 2), DraftRequest(2, 4)])
    assert together.draft([DraftRequest(i, 6) for i in range(3)]) == expected
