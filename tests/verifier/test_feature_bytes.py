"""What a drafter's features take on the wire, per committed token: counted in frames, against the methods' formulas."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.target import SequenceRows, TapSpec, TargetEngine
from services.verifier.features import FeatureHub, Subscriber

HIDDEN, FUSED, LAYERS = 64, 32, 4
TAPS = {
    # method: what it taps, and numbers per committed token
    "deepseek_mtp": (TapSpec(norm_final=True), HIDDEN),
    "deepseek_mtp, residual": (TapSpec(layers=(LAYERS,)), HIDDEN),
    "dflash": (TapSpec(layers=(1, 2, 3), projection=torch.randn(HIDDEN, 3 * HIDDEN)), HIDDEN),
    "eagle1": (TapSpec(norm_final=True), HIDDEN),
    "eagle3": (TapSpec(layers=(1, 2, 3), projection=torch.randn(FUSED, 3 * HIDDEN)), FUSED),
    "p_eagle": (TapSpec(layers=(1, 2, 3), projection=torch.randn(FUSED, 3 * HIDDEN)), FUSED),
    "pard2": (TapSpec(layers=(3, 1), norm_final=True, projection=torch.randn(FUSED, 3 * HIDDEN)), FUSED),
    "eagle3, not fused": (TapSpec(layers=(1, 2, 3)), 3 * HIDDEN),
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target."""
    path = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", TAPS)
async def test_bytes_of_a_committed_token(method: str, dtype: torch.dtype, target_dir: Path) -> None:
    tap, numbers = TAPS[method]
    engine = TargetEngine.load(target_dir, "cpu", dtype, taps=[tap])
    features = engine.step([SequenceRows(engine.open(), list(range(9)), num_logits="none")]).features[0]
    hub = FeatureHub(engine.project)
    hub.open(1)
    subscriber = Subscriber(asyncio.get_running_loop(), "d")
    hub.subscribe(subscriber)
    hub.attach(1, 1, "d", 0)
    sizes = []
    for start, end in ((0, 4), (4, 5), (5, 9)):  # a prompt, one token alone, and four that a draft gave
        hub.append(1, start, features[start:end], tokens=list(range(end - start)))
        frame = await subscriber.pop()
        assert frame is not None
        assert len(frame.features.data) == (end - start) * numbers * dtype.itemsize
        sizes.append(frame.ByteSize() - len(frame.features.data))
    # Beside the features: ids, a byte each here, and a header that does not grow with tokens.
    assert max(sizes) < 64
