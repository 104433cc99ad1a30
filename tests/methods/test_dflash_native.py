"""DFlash's layers on the CPU kernels: near to the torch form, and the same through rejections and in company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.cpu import kernels
from paceline.cpu.context import NativeContext
from paceline.cpu.draft_layer import NativeLayer
from paceline.draft_layer.context import TorchContext
from paceline.draft_layer.torch_layer import TorchLayer
from paceline.methods.block_diffusion.drafter import BlockDrafter
from paceline.methods.block_diffusion.layer import (
    BlockPlan,
    BlockRows,
    DFlashLayer,
    dflash_shapes,
    read_layer,
)
from paceline.methods.block_diffusion.objective import DFlashShape
from paceline.methods.checkpoint import DrafterConfig, load_tensors
from paceline.methods.drafter import DraftRequest
from paceline.methods.dspark.drafter import dspark_shapes
from paceline.methods.dspark.heads import HeadPlan
from paceline.methods.loading import load_drafter
from paceline.models import model_fingerprint
from paceline.target import Device
from paceline.target.kv.cache import KVCache
from paceline.target.kv.slot import KVLayout
from tests.methods.dflash_checkpoint import MASK_TOKEN, random_tensors, save
from tests.methods.native import VOCAB, WIDTH, draft_one, random_features, random_text, save_target

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="the CPU kernels do not run here")

CPU = Device("cpu")
RANK = 16
DRAFT_IDS = list(range(3, 53))
SHAPE = DFlashShape(
    hidden=WIDTH,
    target_hidden=WIDTH,
    num_taps=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate=96,
    draft_vocab=len(DRAFT_IDS),
    target_vocab=VOCAB,
    rope_theta=10000.0,
    rms_eps=1e-5,
    num_layers=2,
    block_size=6,
    mask_token=MASK_TOKEN,
)
METHODS = ["dflash", "dspark"]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with widths that the kernels take."""
    path = tmp_path_factory.mktemp("target")
    save_target(path, num_hidden_layers=4, tie_word_embeddings=True, initializer_range=0.3)
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> dict[str, Path]:
    """A random drafter of each method, in either layout of a block."""
    paths = {}
    for method in METHODS:
        shape = replace(SHAPE, anchor_first=method == "dspark")
        tensors = random_tensors(shape, DRAFT_IDS, seed=5)
        more: dict[str, object] = {}
        if method == "dspark":
            random = torch.Generator().manual_seed(6)
            for name, size in HeadPlan(rank=RANK).parameter_shapes(WIDTH, VOCAB, len(DRAFT_IDS)).items():
                tensors[name] = torch.randn(size, generator=random)
            more = {"markov_head": "vanilla", "markov_rank": RANK, "confidence_head": True}
            more["confidence_reads_token"] = True
        kept = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
        paths[method] = save(
            tmp_path_factory.mktemp(method),
            shape,
            kept,
            model_fingerprint(target_dir),
            [0, 1, 2],
            512,
            method,
            **more,
        )
    return paths


def _load(directory: Path, target_dir: Path) -> BlockDrafter:
    drafter = load_drafter(directory, target_dir, dtype=torch.bfloat16)
    assert isinstance(drafter, BlockDrafter)
    assert isinstance(drafter._blocks._layer, NativeLayer)
    assert isinstance(drafter._blocks._context, NativeContext)
    return drafter


@pytest.mark.parametrize("method", METHODS)
def test_layers_are_near_to_the_torch_form_and_draft_the_same(
    checkpoints: dict[str, Path], method: str
) -> None:
    config = DrafterConfig.read(checkpoints[method])
    shapes = dspark_shapes(config) if method == "dspark" else dflash_shapes(config)
    tensors = load_tensors(checkpoints[method], shapes)
    random = torch.Generator().manual_seed(2)
    embedding, head = torch.randn(2, VOCAB, WIDTH, generator=random).bfloat16()
    weights, context = read_layer(config, tensors, embedding, head[DRAFT_IDS], torch.bfloat16)
    plan, outputs = BlockPlan.read(config), []
    with torch.inference_mode():
        for layer in (
            DFlashLayer(NativeLayer(weights), NativeContext(context), plan, 2),
            DFlashLayer(TorchLayer(weights, CPU), TorchContext(context, CPU), plan, 2),
        ):
            cache = KVCache(KVLayout(2, 2, 32, torch.bfloat16, torch.device("cpu")))
            slots = [cache.get(cache.open(64)) for _ in range(3)]
            # One has no context at all, and one goes on from a context that was run before.
            rows = [BlockRows(slot, random_features(9 * i, i), 7 + i) for i, slot in enumerate(slots)]
            first = layer.forward(rows)
            slots[2].length = 18
            again = layer.forward([BlockRows(slots[2], random_features(4, 8), 11)])
            outputs.append((first.states, first.logits, again.states, again.logits))
            log_probs, ids = again.best(5)
            expected = again.logits.log_softmax(-1).topk(5, dim=-1)
            assert ids == expected.indices.tolist()
            torch.testing.assert_close(torch.tensor(log_probs), expected.values, rtol=1e-5, atol=1e-5)
    for native, plain in zip(*outputs, strict=True):
        level = plain.float().square().mean().sqrt()
        assert (native.float() - plain.float()).square().mean().sqrt() < 0.02 * level
    for native, plain in ((outputs[0][1], outputs[1][1]), (outputs[0][3], outputs[1][3])):
        best = plain.topk(2, dim=-1).values
        is_clear = best[:, 0] - best[:, 1] > 0.1 * plain.std()
        assert is_clear.float().mean() > 0.5
        assert torch.equal(native.argmax(-1)[is_clear], plain.argmax(-1)[is_clear])


@pytest.mark.parametrize("accepted", [0, 2, 4])
@pytest.mark.parametrize("max_nodes", [0, 9])
@pytest.mark.parametrize("method", METHODS)
def test_after_a_verification_equals_a_fresh_drafter(
    checkpoints: dict[str, Path], target_dir: Path, method: str, accepted: int, max_nodes: int
) -> None:
    text, features = random_text(40, 1), random_features(40, 1)
    drafter, fresh = (_load(checkpoints[method], target_dir) for _ in range(2))
    drafter.open(1, text[:20])
    drafter.feed(1, 0, features[:19])
    draft_one(drafter, 1, 5, max_nodes)
    end = 20 + accepted + 1
    drafter.extend(1, 20, text[20:end])
    drafter.feed(1, 19, features[19 : end - 1])
    fresh.open(1, text[:end])
    fresh.feed(1, 0, features[: end - 1])
    assert draft_one(drafter, 1, 5, max_nodes) == draft_one(fresh, 1, 5, max_nodes)


@pytest.mark.parametrize("method", METHODS)
def test_company_does_not_show(checkpoints: dict[str, Path], target_dir: Path, method: str) -> None:
    together, alone = (_load(checkpoints[method], target_dir) for _ in range(2))
    expected = []
    for sequence_id, length in enumerate((5, 12, 30)):
        for drafter in (together, alone):
            drafter.open(sequence_id, random_text(length, sequence_id))
            drafter.feed(sequence_id, 0, random_features(length - 1, sequence_id))
        expected.append(draft_one(alone, sequence_id, 5))
    assert together.draft([DraftRequest(i, 5) for i in range(3)]) == expected
