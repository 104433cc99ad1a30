"""What a drafter's features take on the wire, per committed token: counted in frames, against the methods' formulas."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.contract.errors import InvalidRequestError
from paceline.target import CachedLayer, SequenceRows, TapPart, TapSpec, TargetEngine
from services.runtime import feature_parts, tensors
from services.verifier import feature_hub
from services.verifier.feature_hub import FeatureHub, Subscriber

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_bytes_of_keys_and_values(dtype: torch.dtype, target_dir: Path) -> None:
    """A committed token costs its keys and values in both layers, a round one hidden state, a prompt a window of one.

    Two layers of two key heads of width 32, one read of the newest five positions; the prompt comes in two chunks.
    """
    layers = (CachedLayer(1, 2, 32, window=5), CachedLayer(3, 2, 32))
    tap = TapSpec(norm_final=True, cached=layers)
    engine = TargetEngine.load(target_dir, "cpu", dtype, taps=[tap])
    features = engine.step([SequenceRows(engine.open(), list(range(16)), num_logits="none")]).features[0]
    parts = tap.parts(HIDDEN)
    hub = FeatureHub(engine.project, parts)
    hub.open(1)
    subscriber = Subscriber(asyncio.get_running_loop(), "d")
    hub.subscribe(subscriber)
    hub.attach(1, 1, "d", 0)
    own = 2 * 2 * 32 * dtype.itemsize  # of a token in a layer
    received = []
    for start, end, num_tokens in ((0, 6, 0), (6, 9, 1), (9, 10, 1), (10, 13, 3), (13, 16, 3)):
        hub.append(1, start, features[start:end], tokens=[7] * num_tokens)
        if not num_tokens:  # the prompt goes on: which positions are its newest is not known yet
            continue
        frame = await subscriber.pop()
        assert frame is not None
        first = 0 if start == 6 else start
        assert frame.start == first
        state, window = (part.data for part in frame.recent)
        assert len(frame.features.data) == (end - first) * own
        assert len(window) == min(end - first, 5) * own
        assert len(state) == HIDDEN * dtype.itemsize
        recent = [tensors.decode(part, 1 << 20) for part in frame.recent]
        received.append(feature_parts.join(tensors.decode(frame.features, 1 << 20), recent, parts))
    whole = torch.cat(received)
    travelled = ~whole.isnan()
    assert torch.equal(whole[travelled], features[travelled])
    own_columns = [HIDDEN, 128, 128]
    seen = [column.all(-1).nonzero().flatten().tolist() for column in travelled.split(own_columns, dim=1)]
    assert seen == [[8, 9, 12, 15], list(range(4, 16)), list(range(16))]
    hub.attach(1, 2, "d", 0)  # a drafter that restarts gets what it needs, and no more
    frame = await subscriber.pop()
    assert frame is not None
    assert [list(part.shape) for part in frame.recent] == [[1, HIDDEN], [5, 128]]


async def test_a_long_text_goes_in_several_messages(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_hub, "MAX_CHUNK_BYTES", 4 * (HIDDEN + 256) * 4)  # four positions
    tap = TapSpec(norm_final=True, cached=(CachedLayer(1, 2, 32, window=6), CachedLayer(3, 2, 32)))
    engine = TargetEngine.load(target_dir, "cpu", torch.float32, taps=[tap])
    features = engine.step([SequenceRows(engine.open(), list(range(10)), num_logits="none")]).features[0]
    parts = tap.parts(HIDDEN)
    hub = FeatureHub(engine.project, parts)
    hub.open(1)
    subscriber = Subscriber(asyncio.get_running_loop(), "d")
    hub.subscribe(subscriber)
    hub.attach(1, 1, "d", 0)
    hub.append(1, 0, features, tokens=[3, 4])
    frames = [await subscriber.pop() for _ in range(3)]
    assert [frame.start for frame in frames if frame] == [0, 2, 6]
    assert [list(frame.tokens) for frame in frames if frame] == [[], [], [3, 4]]
    rows = [
        feature_parts.join(
            tensors.decode(frame.features, 1 << 20),
            [tensors.decode(part, 1 << 20) if part.data else None for part in frame.recent],
            parts,
        )
        for frame in frames
        if frame
    ]
    travelled = ~torch.cat(rows).isnan()
    seen = [
        column.all(-1).nonzero().flatten().tolist() for column in travelled.split([HIDDEN, 128, 128], dim=1)
    ]
    assert seen == [[9], list(range(4, 10)), list(range(10))]


@pytest.mark.parametrize(
    ("recent", "words"),
    [
        ([], "2 parts expected"),
        ([torch.zeros(2, 3), None], r"\[at most 1, 3\]"),
        ([None, torch.zeros(2, 5)], r"\[at most 4, 4\]"),
        ([torch.zeros(1, 3, dtype=torch.bfloat16), None], "float32 expected"),
    ],
)
def test_parts_that_do_not_fit_are_refused(recent: list[torch.Tensor | None], words: str) -> None:
    parts = (TapPart(3, 1), TapPart(4, 7), TapPart(6, 0))
    with pytest.raises(InvalidRequestError, match=words):
        feature_parts.join(torch.zeros(4, 6), recent, parts)
    with pytest.raises(InvalidRequestError, match="width 6 expected"):
        feature_parts.join(torch.zeros(4, 5), recent, parts)
