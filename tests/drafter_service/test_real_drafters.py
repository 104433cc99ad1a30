"""Real drafters in the service: an independent model as a real process, EAGLE with the features of a real target."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.contract.errors import IncompatiblePeerError
from paceline.methods.block_diffusion.layer import dflash_shapes
from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.deepseek_mtp.objective import MtpShape
from paceline.methods.drafter import DraftRequest
from paceline.methods.dspark.drafter import dspark_shapes
from paceline.methods.eagle.feature_layer import parameter_shapes as eagle1_shapes
from paceline.methods.eagle.fused_layer import parameter_shapes
from paceline.methods.gemma4_mtp.model import FULL
from paceline.methods.loading import drafter_tap, load_drafter
from paceline.methods.p_eagle.drafter import p_eagle_shapes
from paceline.models import model_fingerprint
from paceline.target import SequenceRows, TargetEngine
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, peer_pb2
from services.drafter.host import DrafterHost
from services.drafter.settings import DrafterSettings
from services.runtime.channel import open_channel
from tests.drafter_service.conftest import Bench, Conductor, commits, eventually, opening
from tests.drafter_service.scripted import ScriptedFeatures
from tests.hosting import hosted
from tests.methods.foreign import byte_fallback_tokenizer, byte_level_tokenizer, save_model
from tests.methods.gemma4_checkpoint import FOR_LLAMA, save_assistant
from tests.methods.pard_checkpoint import save as save_pard2

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 64
HIDDEN_SIZE = 32
PROMPT = [3, 9, 27, 14, 5]


def make_target(path: Path, seed: int) -> Path:
    """A random Llama, saved with a tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    vocabulary = {f"t{token}": token for token in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target."""
    return make_target(tmp_path_factory.mktemp("target"), seed=5)


@pytest.fixture(scope="module")
def independent_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """An independent drafter that is the target itself, so that its drafts are the target's own text."""
    path = tmp_path_factory.mktemp("independent")
    config = DrafterConfig("independent", model_fingerprint(target_dir), "tiny", {"target_vocab": VOCAB_SIZE})
    shutil.copytree(target_dir, path / "model")
    (path / "config.json").write_text(
        json.dumps(
            {
                "method": config.method,
                "target_fingerprint": config.target_fingerprint,
                "shape": dict(config.shape),
                "format_version": config.format_version,
            }
        )
    )
    return path


@pytest.fixture(scope="module")
def eagle3_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """An EAGLE-3 drafter with random weights."""
    path = tmp_path_factory.mktemp("eagle3")
    shape: dict[str, Any] = {
        "hidden": 24,
        "target_hidden": HIDDEN_SIZE,
        "head_dim": 8,
        "intermediate": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "target_vocab": VOCAB_SIZE,
        "draft_vocab": VOCAB_SIZE,
        "tap_layers": [1, 2, 3],
        "max_positions": 100,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
    }
    config = DrafterConfig("eagle3", model_fingerprint(target_dir), "tiny", shape)
    torch.manual_seed(11)
    tensors = {}
    for name, size in parameter_shapes(config).items():
        if name == "d2t":
            tensors[name] = torch.zeros(size, dtype=torch.int64)
        elif name == "t2d":
            tensors[name] = torch.ones(size, dtype=torch.bool)
        else:
            tensors[name] = torch.ones(size) if "norm" in name else torch.randn(size) * 0.3
    save_drafter(path, config, tensors)
    return path


@pytest.fixture(scope="module")
def p_eagle_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path, eagle3_dir: Path) -> Path:
    """A P-EAGLE drafter with random weights, of the EAGLE-3 drafter's sizes and two layers."""
    path = tmp_path_factory.mktemp("p_eagle")
    shape = {**DrafterConfig.read(eagle3_dir).shape, "num_layers": 2, "num_depths": 3, "mask_token": 63}
    config = DrafterConfig("p_eagle", model_fingerprint(target_dir), "tiny", shape)
    torch.manual_seed(13)
    tensors = {
        name: torch.ones(size) if "norm" in name else torch.randn(size) * 0.3
        for name, size in p_eagle_shapes(config).items()
    }
    tensors["d2t"] = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    tensors["t2d"] = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    save_drafter(path, config, tensors)
    return path


@pytest.fixture(scope="module")
def pard2_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """A PARD-2 drafter with random weights, narrower than its target."""
    torch.manual_seed(17)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=100,
        initializer_range=0.5,
    )
    model = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(config).save_pretrained(model)
    path = tmp_path_factory.mktemp("pard2")
    return save_pard2(path, model, "pard2", model_fingerprint(target_dir), target_hidden=HIDDEN_SIZE)


@pytest.fixture(scope="module")
def dflash_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path, eagle3_dir: Path) -> Path:
    """A DFlash drafter with random weights, of the target's width."""
    path = tmp_path_factory.mktemp("dflash")
    shape = {**DrafterConfig.read(eagle3_dir).shape, "num_layers": 2, "block_size": 4, "mask_token": 63}
    shape |= {"hidden": HIDDEN_SIZE, "head_norms": True}
    config = DrafterConfig("dflash", model_fingerprint(target_dir), "tiny", shape)
    torch.manual_seed(14)
    tensors = {
        name: torch.ones(size) if "norm" in name else torch.randn(size) * 0.3
        for name, size in dflash_shapes(config).items()
    }
    tensors["d2t"] = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    tensors["t2d"] = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    save_drafter(path, config, tensors)
    return path


@pytest.fixture(scope="module")
def dspark_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path, dflash_dir: Path) -> Path:
    """A DSpark drafter with random weights, of the DFlash drafter's sizes."""
    path = tmp_path_factory.mktemp("dspark")
    shape = {**DrafterConfig.read(dflash_dir).shape, "anchor_first": True}
    shape |= {"markov_head": "rnn", "markov_rank": 4, "confidence_head": True, "confidence_reads_token": True}
    config = DrafterConfig("dspark", model_fingerprint(target_dir), "tiny", shape)
    torch.manual_seed(15)
    tensors = {
        name: torch.ones(size) if "norm" in name else torch.randn(size) * 0.3
        for name, size in dspark_shapes(config).items()
    }
    tensors["d2t"] = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    tensors["t2d"] = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    save_drafter(path, config, tensors)
    return path


@pytest.fixture(scope="module")
def eagle1_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """An EAGLE-1 drafter with random weights."""
    path = tmp_path_factory.mktemp("eagle1")
    shape: dict[str, Any] = {
        "hidden": HIDDEN_SIZE,
        "head_dim": 8,
        "intermediate": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "target_vocab": VOCAB_SIZE,
        "fc_bias": False,
        "max_positions": 100,
    }
    config = DrafterConfig("eagle1", model_fingerprint(target_dir), "tiny", shape)
    torch.manual_seed(12)
    tensors = {
        name: torch.ones(size) if "norm" in name else torch.randn(size) * 0.3
        for name, size in eagle1_shapes(config).items()
    }
    save_drafter(path, config, tensors)
    return path


@pytest.fixture(scope="module")
def gemma4_mtp_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """A random assistant that reads the last layer's keys and values."""
    shape: dict[str, object] = {
        **FOR_LLAMA, "backbone": HIDDEN_SIZE, "vocab": VOCAB_SIZE, "head_dims": {FULL: 8}, "kv_layers": {FULL: 2},
        "max_positions": 100,
    }  # fmt: skip
    return save_assistant(tmp_path_factory.mktemp("gemma4_mtp"), target_dir, shape)


@pytest.fixture(scope="module")
def deepseek_mtp_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """Two random modules of multi-token prediction."""
    shape = MtpShape(
        hidden=HIDDEN_SIZE, num_heads=4, num_kv_heads=2, head_dim=8, intermediate=48, target_vocab=VOCAB_SIZE,
        target_layers=3, rope_theta=10000.0, rms_eps=1e-5, num_modules=2, carries_norm=False,
    )  # fmt: skip
    random = torch.Generator().manual_seed(21)
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=random) * 0.3
        for name, size in shape.parameter_shapes().items()
    }
    content = {**asdict(shape), "max_positions": 100}
    path = tmp_path_factory.mktemp("deepseek_mtp")
    save_drafter(path, DrafterConfig("deepseek_mtp", model_fingerprint(target_dir), "tiny", content), tensors)
    return path


def greedy(target_dir: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """The target's own text."""
    engine = TargetEngine.load(target_dir, dtype=torch.float32)
    slot = engine.open()
    tokens: list[int] = []
    rows = list(prompt)
    while len(tokens) < num_tokens:
        out = engine.step([SequenceRows(slot, rows, num_logits="last")])
        rows = [int(out.logits[0][-1].argmax())]
        tokens += rows
    return tokens


def start_process(folder: Path, drafter: Path, target: Path) -> subprocess.Popen[bytes]:
    """The entry point, as it is deployed."""
    command = [sys.executable, "-m", "services.drafter", "--drafter", str(drafter), "--model", str(target)]
    command += [
        "--port",
        "0",
        "--metrics-port",
        "0",
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--drain-s",
        "3",
    ]
    command += ["--ready-file", str(folder / "ready.json")]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
        )


@pytest.mark.integration
async def test_process_drafts_the_targets_text_and_ends_on_sigterm(
    tmp_path: Path, target_dir: Path, independent_dir: Path
) -> None:
    process = start_process(tmp_path, independent_dir, target_dir)
    try:
        ready_file = tmp_path / "ready.json"
        await eventually(lambda: ready_file.exists() or process.poll() is not None, timeout_s=60)
        assert process.poll() is None, (tmp_path / "log").read_text()
        channel = open_channel(f"127.0.0.1:{json.loads(ready_file.read_text())['port']}")
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        described = await stub.Describe(drafter_pb2.DrafterServiceDescribeRequest(), timeout=5)
        assert described.info.method == "independent"
        assert described.info.model_fingerprint == model_fingerprint(target_dir)
        assert (described.info.vocab_size, described.info.max_positions) == (VOCAB_SIZE, 128)
        conductor = await Conductor(stub).begin()
        text = greedy(target_dir, PROMPT, 12)
        policy = peer_pb2.StepPolicy(draft_length=4, draft_ahead=4)
        await conductor.send(opens=[opening(1, PROMPT)], policy=policy)
        assert list((await conductor.read_drafts()).drafts.tokens) == text[:4]
        ahead = text[:4]
        while len(ahead) < 8:  # in one piece, or in several where it takes long
            longer = list((await conductor.read_drafts()).drafts.tokens)
            assert longer == text[: len(longer)]
            assert len(longer) > len(ahead)
            ahead = longer
        await conductor.send(commits=commits((1, 5, text[:3])))
        answer = await conductor.read_drafts()
        assert list(answer.drafts.starts) == [8]
        assert list(answer.drafts.tokens)[:4] == text[3:7]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
        await channel.close()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


@pytest.mark.integration
async def test_a_bare_model_with_another_tokenizer_serves_as_a_process(tmp_path: Path) -> None:
    target, own = byte_level_tokenizer(), byte_fallback_tokenizer()
    target_dir = save_model(tmp_path / "target", target, target.get_vocab_size(), seed=0)
    own_dir = save_model(tmp_path / "own", own, own.get_vocab_size(), seed=1)
    prompt = target.encode("The wind of the ri").ids
    alone = load_drafter(own_dir, target_dir, dtype=torch.float32)

    def wanted(tokens: list[int], num_tokens: int) -> list[int]:
        alone.open(1, tokens)
        (entry,) = alone.draft([DraftRequest(1, num_tokens)])
        assert entry is not None
        return list(entry.tokens)

    process = start_process(tmp_path, own_dir, target_dir)
    try:
        ready_file = tmp_path / "ready.json"
        await eventually(lambda: ready_file.exists() or process.poll() is not None, timeout_s=60)
        assert process.poll() is None, (tmp_path / "log").read_text()
        channel = open_channel(f"127.0.0.1:{json.loads(ready_file.read_text())['port']}")
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        described = await stub.Describe(drafter_pb2.DrafterServiceDescribeRequest(), timeout=5)
        assert described.info.vocab_size == target.get_vocab_size()
        assert described.info.model_fingerprint == model_fingerprint(target_dir)
        conductor = await Conductor(stub).begin()
        await conductor.send(opens=[opening(1, prompt)], policy=peer_pb2.StepPolicy(draft_length=4))
        assert list((await conductor.read_drafts()).drafts.tokens) == wanted(prompt, 4)
        correction = target.encode("de").ids  # "ri" becomes "ride", one token of the drafter's
        await conductor.send(commits=commits((1, len(prompt), correction)))
        answer = await conductor.read_drafts()
        assert list(answer.drafts.starts) == [len(prompt) + len(correction)]
        assert list(answer.drafts.tokens) == wanted([*prompt, *correction], 4)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
        await channel.close()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def test_drafter_for_another_target_is_refused(tmp_path: Path, independent_dir: Path) -> None:
    other = make_target(tmp_path / "other", seed=6)
    with pytest.raises(IncompatiblePeerError, match="was made for target"):
        DrafterHost.load(
            DrafterSettings(drafter=independent_dir, model=str(other), dtype="float32"), num_threads=1
        )


@pytest.mark.parametrize(
    ("method", "width"),
    [
        ("deepseek_mtp", HIDDEN_SIZE),
        ("dflash", HIDDEN_SIZE),
        ("dspark", HIDDEN_SIZE),
        ("eagle1", HIDDEN_SIZE),
        ("eagle3", 24),
        ("gemma4_mtp", HIDDEN_SIZE + 2 * 2 * 8),
        ("p_eagle", 24),
        ("pard2", 24),
    ],
)
async def test_it_drafts_over_the_wire_what_it_drafts_alone(
    bench: Bench, target_dir: Path, method: str, width: int, request: pytest.FixtureRequest
) -> None:
    drafter_dir = request.getfixturevalue(f"{method}_dir")
    tap = drafter_tap(drafter_dir)
    assert tap is not None
    engine = TargetEngine.load(target_dir, dtype=torch.float32, taps=[tap])
    text = [*PROMPT, *greedy(target_dir, PROMPT, 8)]
    slot = engine.open()
    features = engine.step([SequenceRows(slot, text, num_logits="none")]).features[0].clone()

    alone = load_drafter(drafter_dir, target_dir, dtype=torch.float32)
    alone.open(1, text[:5])
    alone.feed(1, 0, features[:4])
    (first,) = alone.draft([DraftRequest(1, 3)])
    alone.extend(1, 5, text[5:8])
    alone.feed(1, 4, features[4:7])
    (second,) = alone.draft([DraftRequest(1, 3)])
    assert first is not None
    assert second is not None

    host, verifier, conductor = await serve(bench, drafter_dir, target_dir)
    assert host.info.tap.width == width
    assert host.info.max_positions == 100
    await conductor.send(
        opens=[opening(4, text[:5], verifier_endpoint=verifier.endpoint, verifier_instance_id="verifier-1")],
        policy=peer_pb2.StepPolicy(draft_length=3),
    )
    await eventually(lambda: verifier.num_streams)
    verifier.push(4, 0, 4, features[:4])
    assert list((await conductor.read_drafts()).drafts.tokens) == list(first.tokens)
    await conductor.send(commits=commits((4, 5, text[5:8])))
    verifier.push(4, 4, 3, features[4:7])
    assert list((await conductor.read_drafts()).drafts.tokens) == list(second.tokens)


async def test_features_that_run_ahead_of_the_tokens_are_waited_with_in_silence(
    bench: Bench, target_dir: Path, gemma4_mtp_dir: Path
) -> None:
    """A drafter that joins late: the final norm it needs did not travel, as it is not the newest position's."""
    alone = load_drafter(gemma4_mtp_dir, target_dir, dtype=torch.float32)
    assert alone.tap is not None
    engine = TargetEngine.load(target_dir, dtype=torch.float32, taps=[alone.tap])
    text = [*PROMPT, *greedy(target_dir, PROMPT, 4)]
    features = engine.step([SequenceRows(engine.open(), text, num_logits="none")]).features[0].clone()
    alone.open(1, text)
    alone.feed(1, 0, features[:8])
    (expected,) = alone.draft([DraftRequest(1, 3)])
    assert expected is not None

    _, verifier, conductor = await serve(bench, gemma4_mtp_dir, target_dir)
    frame_id = await conductor.send(
        opens=[opening(4, text[:5], verifier_endpoint=verifier.endpoint, verifier_instance_id="verifier-1")],
        policy=peer_pb2.StepPolicy(draft_length=3),
    )
    await eventually(lambda: verifier.num_streams)
    verifier.push(4, 0, 8, features[:8])
    for _ in range(4):
        answer = await conductor.read()
        assert (answer.frame_id, list(answer.drafts.tokens)) == (frame_id, [])
        frame_id = await conductor.send()
    assert (await conductor.read()).frame_id == frame_id
    await conductor.send(commits=commits((4, 5, text[5:])))
    assert list((await conductor.read()).drafts.tokens) == list(expected.tokens)


async def serve(
    bench: Bench, drafter_dir: Path, target_dir: Path
) -> tuple[DrafterHost, ScriptedFeatures, Conductor]:
    """A drafter, who sends it features, and a stream to it."""
    settings = DrafterSettings(
        drafter=drafter_dir,
        model=str(target_dir),
        dtype="float32",
        port=0,
        metrics_port=None,
        feature_wait_ms=5000,
    )
    host = DrafterHost.load(settings, num_threads=1)
    process = await bench.stack.enter_async_context(hosted("drafter", settings, host.attach))
    verifier = ScriptedFeatures(peer_pb2.PeerInfo())
    verifier.info.CopyFrom(host.info)
    verifier.info.instance_id = "verifier-1"
    await verifier.start()
    bench.stack.push_async_callback(verifier.stop)
    channel = open_channel(f"127.0.0.1:{process.port}")
    bench.stack.push_async_callback(channel.close)
    conductor = await Conductor(drafter_pb2_grpc.DrafterServiceStub(channel)).begin()
    bench.stack.callback(conductor.close)
    return host, verifier, conductor


async def test_a_block_that_no_longer_fits_is_asked_for_once(
    bench: Bench, target_dir: Path, dflash_dir: Path
) -> None:
    """The drafter has positions for the tokens that are asked for, and none for the block that they come in."""
    _, verifier, conductor = await serve(bench, dflash_dir, target_dir)
    text = list(range(1, 60)) * 2
    await conductor.send(
        opens=[opening(4, text[:97], verifier_endpoint=verifier.endpoint, verifier_instance_id="verifier-1")],
        policy=peer_pb2.StepPolicy(draft_length=2),
    )
    await eventually(lambda: verifier.num_streams)
    features = torch.randn(97, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
    verifier.push(4, 0, 96, features[:96])
    assert len((await conductor.read_drafts()).drafts.tokens) == 2  # the block's rows are positions 96 to 99
    frame_id = await conductor.send(commits=commits((4, 97, text[97:98])))
    verifier.push(4, 96, 1, features[96:])
    for _ in range(4):
        answer = await conductor.read()
        assert (answer.frame_id, list(answer.drafts.tokens), list(answer.failures)) == (frame_id, [], [])
        frame_id = await conductor.send()
