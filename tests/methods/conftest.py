"""A tiny random target and random drafters for it, saved as real checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.methods.block_diffusion.objective import DFlashShape
from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.deepseek_mtp.objective import MtpShape
from paceline.methods.drafter import Drafter
from paceline.methods.dspark.heads import HeadPlan, MarkovHead
from paceline.methods.eagle.feature_objective import Eagle1Shape
from paceline.methods.eagle.fused_shape import Eagle3Shape
from paceline.methods.loading import load_drafter
from paceline.methods.medusa_heads.heads import MedusaShape
from paceline.methods.p_eagle.objective import PEagleShape
from paceline.models import model_fingerprint
from paceline.target import SequenceRows, TargetEngine
from tests.methods import dflash_checkpoint, gemma4_checkpoint, pard_checkpoint
from tests.methods.p_eagle_checkpoint import MASK_TOKEN, random_tensors, save

VOCAB = 97
DRAFT_IDS = [3, 4, 7, *range(10, 60), 90, 96]
TAP_LAYERS = [1, 2, 4]

SHAPE = Eagle3Shape(
    hidden=64,
    target_hidden=64,
    num_taps=len(TAP_LAYERS),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=96,
    draft_vocab=len(DRAFT_IDS),
    target_vocab=VOCAB,
    rope_theta=10000.0,
    rms_eps=1e-5,
)

EAGLE1_SHAPE = Eagle1Shape(
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=96,
    target_vocab=VOCAB,
    rope_theta=10000.0,
    rms_eps=1e-5,
)

P_EAGLE_SHAPE = PEagleShape(
    **{name: getattr(SHAPE, name) for name in Eagle3Shape.__dataclass_fields__},
    num_layers=3,
    num_depths=6,
    mask_token=MASK_TOKEN,
)

DFLASH_SHAPE = DFlashShape(
    **{name: getattr(SHAPE, name) for name in Eagle3Shape.__dataclass_fields__},
    num_layers=3,
    block_size=7,
    mask_token=dflash_checkpoint.MASK_TOKEN,
)
DSPARK_SHAPE = replace(DFLASH_SHAPE, anchor_first=True)
DSPARK_HEADS = HeadPlan(MarkovHead.VANILLA, rank=8)


def _save_llama(path: Path, num_layers: int, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: 4 layers, 64 wide, 97 tokens."""
    return _save_llama(tmp_path_factory.mktemp("target"), 4, seed=0)


@pytest.fixture(scope="session")
def eagle3_tensors() -> dict[str, torch.Tensor]:
    """Random weights of an EAGLE-3 checkpoint, by public name."""
    random = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in SHAPE.parameter_shapes().items():
        if len(size) == 1:
            tensors[name] = 1.0 + 0.2 * torch.randn(size, generator=random)
        else:
            tensors[name] = torch.randn(size, generator=random) * 1.5 * size[1] ** -0.5
            # Small features and strong branches, so that a chain depends on its tokens and does not repeat one.
            tensors[name] *= (
                0.05 if name == "fc.weight" else 3.0 if "o_proj" in name or "down_proj" in name else 1.0
            )
    ids = torch.tensor(DRAFT_IDS)
    tensors["d2t"] = ids - torch.arange(len(DRAFT_IDS))
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


@pytest.fixture(scope="session")
def eagle3_dir(
    target_dir: Path, eagle3_tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The checkpoint of those weights."""
    path = tmp_path_factory.mktemp("eagle3")
    shape = {
        "hidden": SHAPE.hidden,
        "target_hidden": SHAPE.target_hidden,
        "num_heads": SHAPE.num_heads,
        "num_kv_heads": SHAPE.num_kv_heads,
        "head_dim": SHAPE.head_dim,
        "intermediate": SHAPE.intermediate,
        "draft_vocab": SHAPE.draft_vocab,
        "target_vocab": SHAPE.target_vocab,
        "rope_theta": SHAPE.rope_theta,
        "rms_eps": SHAPE.rms_eps,
        "tap_layers": TAP_LAYERS,
        "max_positions": 64,
    }
    save_drafter(path, DrafterConfig("eagle3", model_fingerprint(target_dir), "tiny", shape), eagle3_tensors)
    return path


@pytest.fixture(scope="session")
def eagle1_tensors() -> dict[str, torch.Tensor]:
    """Random weights of an EAGLE-1 checkpoint, by public name."""
    random = torch.Generator().manual_seed(15)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in EAGLE1_SHAPE.parameter_shapes().items():
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.2 * torch.randn(size, generator=random)
        else:
            tensors[name] = torch.randn(size, generator=random) * size[-1] ** -0.5
            # Small outputs, or few tokens would be likely; embeddings that count beside features.
            tensors[name] *= 0.2 if name.startswith("fc.") else 1.0
    tensors["fc.weight"][:, :64] *= 10.0
    return tensors


def eagle1_config(target_dir: Path, method: str = "eagle1", **changes: object) -> DrafterConfig:
    """What the checkpoint of those weights says."""
    shape = asdict(EAGLE1_SHAPE) | {"fc_bias": True, "max_positions": 64, **changes}
    return DrafterConfig(method, model_fingerprint(target_dir), "tiny", shape)


@pytest.fixture(scope="session")
def eagle1_dir(
    target_dir: Path, eagle1_tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The checkpoint of those weights."""
    path = tmp_path_factory.mktemp("eagle1")
    save_drafter(path, eagle1_config(target_dir), eagle1_tensors)
    return path


@pytest.fixture(scope="session")
def eagle2_dir(
    target_dir: Path, eagle1_tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same weights, to be served as EAGLE-2."""
    path = tmp_path_factory.mktemp("eagle2")
    save_drafter(path, eagle1_config(target_dir, "eagle2"), eagle1_tensors)
    return path


@pytest.fixture(scope="session")
def p_eagle_tensors() -> dict[str, torch.Tensor]:
    """Random weights of a P-EAGLE checkpoint, by public name."""
    return random_tensors(P_EAGLE_SHAPE, DRAFT_IDS, seed=5)


@pytest.fixture(scope="session")
def p_eagle_dir(
    target_dir: Path, p_eagle_tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The checkpoint of those weights."""
    path = tmp_path_factory.mktemp("p_eagle")
    return save(path, P_EAGLE_SHAPE, p_eagle_tensors, model_fingerprint(target_dir), TAP_LAYERS, 64)


@pytest.fixture(scope="session")
def pard_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model of the target's vocabulary."""
    return _save_llama(tmp_path_factory.mktemp("pard_model"), 2, seed=3)


@pytest.fixture(scope="session")
def pard1_dir(pard_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That model with a mask token, for any target."""
    return pard_checkpoint.save(tmp_path_factory.mktemp("pard1"), pard_model_dir, "pard1")


@pytest.fixture(scope="session")
def pard2_dir(pard_model_dir: Path, target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That model with a mask token and features of the target."""
    path = tmp_path_factory.mktemp("pard2")
    return pard_checkpoint.save(path, pard_model_dir, "pard2", model_fingerprint(target_dir))


@pytest.fixture(scope="session")
def dflash_tensors() -> dict[str, torch.Tensor]:
    """Random weights of a DFlash checkpoint, by public name."""
    return dflash_checkpoint.random_tensors(DFLASH_SHAPE, DRAFT_IDS, seed=5)


@pytest.fixture(scope="session")
def dflash_dir(
    target_dir: Path, dflash_tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The checkpoint of those weights."""
    path, fingerprint = tmp_path_factory.mktemp("dflash"), model_fingerprint(target_dir)
    return dflash_checkpoint.save(path, DFLASH_SHAPE, dflash_tensors, fingerprint, TAP_LAYERS, 64)


def dspark_tensors(plan: HeadPlan, seed: int = 17) -> dict[str, torch.Tensor]:
    """Random weights of a DSpark checkpoint with these heads, which count beside the block."""
    tensors = dflash_checkpoint.random_tensors(DSPARK_SHAPE, DRAFT_IDS, seed)
    random = torch.Generator().manual_seed(seed + 1)
    for name, size in plan.parameter_shapes(64, VOCAB, len(DRAFT_IDS)).items():
        tensors[name] = torch.randn(size, generator=random) * (0.2 if "proj.weight" in name else 1.0)
    return tensors


def save_dspark(path: Path, target_dir: Path, plan: HeadPlan) -> Path:
    """The checkpoint of those weights."""
    return dflash_checkpoint.save(
        path, DSPARK_SHAPE, dspark_tensors(plan), model_fingerprint(target_dir), TAP_LAYERS, 64, "dspark",
        markov_head=plan.markov.value, markov_rank=plan.rank, confidence_head=plan.has_confidence,
        confidence_reads_token=plan.confidence_reads_token,
        confidence_temperatures=list(plan.temperatures),
    )  # fmt: skip


@pytest.fixture(scope="session")
def dspark_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DSpark drafter with a plain Markov head."""
    return save_dspark(tmp_path_factory.mktemp("dspark"), target_dir, DSPARK_HEADS)


@pytest.fixture(scope="session")
def independent_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one-layer model of the target's vocabulary."""
    path = tmp_path_factory.mktemp("independent")
    _save_llama(path / "model", 1, seed=1)
    content = {
        "method": "independent",
        "target_fingerprint": model_fingerprint(target_dir),
        "target_name": "tiny",
        "shape": {"target_vocab": VOCAB},
        "format_version": 1,
    }
    (path / "config.json").write_text(json.dumps(content))
    return path


MTP_SHAPE = MtpShape(
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=96,
    target_vocab=VOCAB,
    target_layers=4,
    rope_theta=10000.0,
    rms_eps=1e-5,
    num_modules=1,
    carries_norm=False,
)


def mtp_tensors(shape: MtpShape, seed: int = 21) -> dict[str, torch.Tensor]:
    """Random modules whose chains depend on their tokens."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in shape.parameter_shapes().items():
        values = torch.randn(size, generator=random)
        tensors[name] = 1.0 + 0.2 * values if len(size) == 1 else values * 1.5 * size[1] ** -0.5
    return tensors


def save_mtp(
    path: Path, target_dir: Path, shape: MtpShape, tensors: dict[str, torch.Tensor], **changes: object
) -> Path:
    """A checkpoint of some modules."""
    content = {**asdict(shape), "max_positions": 64, **changes}
    save_drafter(path, DrafterConfig("deepseek_mtp", model_fingerprint(target_dir), "tiny", content), tensors)
    return path


@pytest.fixture(scope="session")
def deepseek_mtp_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One random module."""
    path = tmp_path_factory.mktemp("deepseek_mtp")
    return save_mtp(path, target_dir, MTP_SHAPE, mtp_tensors(MTP_SHAPE))


@pytest.fixture(scope="session")
def deepseek_mtp3_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three random modules in sequence, which hand on what their last norm gives."""
    shape = replace(MTP_SHAPE, num_modules=3, carries_norm=True)
    return save_mtp(tmp_path_factory.mktemp("deepseek_mtp3"), target_dir, shape, mtp_tensors(shape))


@pytest.fixture(scope="session")
def gemma4_mtp_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random assistant that reads the last layer's keys and values."""
    path = tmp_path_factory.mktemp("gemma4_mtp")
    return gemma4_checkpoint.save_assistant(path, target_dir, gemma4_checkpoint.FOR_LLAMA)


MEDUSA = MedusaShape(hidden=64, target_vocab=VOCAB, draft_vocab=len(DRAFT_IDS), num_heads=5)


def medusa_tensors(shape: MedusaShape, seed: int = 9) -> dict[str, torch.Tensor]:
    """Random heads whose likeliest tokens differ from text to text."""
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(size, generator=random) * (1.5 * shape.hidden**-0.5 if len(size) == 2 else 0.3)
        for name, size in shape.parameter_shapes().items()
    }
    if shape.is_reduced:
        tensors["token_map"] = torch.tensor(DRAFT_IDS[: shape.draft_vocab])
    return tensors


def save_medusa(
    path: Path, target_dir: Path, shape: MedusaShape, tensors: dict[str, torch.Tensor], **changes: object
) -> Path:
    """A checkpoint of some heads."""
    content = {**asdict(shape), "max_positions": 64, **changes}
    save_drafter(path, DrafterConfig("medusa1", model_fingerprint(target_dir), "tiny", content), tensors)
    return path


@pytest.fixture(scope="session")
def medusa1_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five random heads of their own over a reduced vocabulary."""
    return save_medusa(tmp_path_factory.mktemp("medusa1"), target_dir, MEDUSA, medusa_tensors(MEDUSA))


@pytest.fixture(scope="session")
def drafter_dirs(
    deepseek_mtp_dir: Path,
    deepseek_mtp3_dir: Path,
    dflash_dir: Path,
    dspark_dir: Path,
    eagle1_dir: Path,
    eagle2_dir: Path,
    eagle3_dir: Path,
    gemma4_mtp_dir: Path,
    independent_dir: Path,
    medusa1_dir: Path,
    p_eagle_dir: Path,
    pard1_dir: Path,
    pard2_dir: Path,
) -> dict[str, Path]:
    """The checkpoints by method."""
    return {
        "deepseek_mtp": deepseek_mtp_dir,
        "deepseek_mtp3": deepseek_mtp3_dir,
        "dflash": dflash_dir,
        "dspark": dspark_dir,
        "eagle1": eagle1_dir,
        "eagle2": eagle2_dir,
        "eagle3": eagle3_dir,
        "gemma4_mtp": gemma4_mtp_dir,
        "independent": independent_dir,
        "medusa1": medusa1_dir,
        "p_eagle": p_eagle_dir,
        "pard1": pard1_dir,
        "pard2": pard2_dir,
    }


@pytest.fixture
def load(target_dir: Path) -> Callable[[Path], Drafter]:
    """Loads a checkpoint in float32."""
    return lambda path: load_drafter(path, target_dir, dtype=torch.float32)


class Target:
    """The target alone: features of a text under a drafter's tap."""

    def __init__(self, target_dir: Path) -> None:
        self._dir = target_dir

    def features(self, drafter: Drafter, tokens: list[int]) -> torch.Tensor:
        """Features of every position of `tokens`, `[n, width]`; empty for drafters without a tap."""
        if drafter.tap is None:
            return torch.zeros(len(tokens), 0)
        engine = TargetEngine.load(self._dir, "cpu", torch.float32, taps=[drafter.tap])
        return engine.step([SequenceRows(engine.open(), tokens, num_logits="none")]).features[0].clone()

    def taps(self, tokens: list[int]) -> torch.Tensor:
        """The residual streams entering the tap layers, joined: `[n, 3 * hidden]`."""
        model = LlamaForCausalLM.from_pretrained(self._dir, dtype=torch.float32)
        with torch.inference_mode():
            states = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            # The entry behind the last layer is normed in `hidden_states`; the tap reads it before the norm.
            captured: list[torch.Tensor] = []
            hook = model.model.norm.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
            model.model(torch.tensor([tokens]))
            hook.remove()
        streams = [captured[0] if layer == 4 else states[layer] for layer in TAP_LAYERS]
        return torch.cat(streams, dim=-1)[0]


@pytest.fixture(scope="session")
def target(target_dir: Path) -> Target:
    """The target that drafters are made for."""
    return Target(target_dir)


def text(length: int, seed: int) -> list[int]:
    """Random token ids."""
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
