"""A real verifier server around a tiny random target."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.dials.verifier_process import stretch
from paceline.target import SequenceRows, TapSpec, TargetEngine
from services.runtime.process import Process
from services.verifier.host import VerifierHost
from services.verifier.settings import VerifierSettings
from tests.hosting import hosted
from tests.verifier.conductor import MAX_POSITIONS, VOCAB_SIZE
from tests.verifier.driver import Driver


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokens are words of no meaning."""
    vocabulary = {f"t{token}": token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    return save_target(tmp_path_factory.mktemp("target"), VOCAB_SIZE, tokenizer)


def save_target(path: Path, vocab_size: int, tokenizer: Tokenizer, eos_token_id: int = 2) -> Path:
    """A random Llama whose greedy text wanders (a large initial range keeps it from repeating at once)."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def plain_text(target_dir: Path) -> Any:
    """Greedy continuation by the engine alone: (prompt, count) -> tokens."""
    engine = TargetEngine.load(target_dir, dtype=torch.float32)

    def run(prompt: Sequence[int], num_tokens: int) -> list[int]:
        slot = engine.open()
        out = engine.step([SequenceRows(slot, list(prompt), num_logits="last")])
        tokens = [int(out.logits[0][-1].argmax())]
        while len(tokens) < num_tokens:
            out = engine.step([SequenceRows(slot, tokens[-1:], num_logits="last")])
            tokens.append(int(out.logits[0][-1].argmax()))
        engine.close(slot)
        return tokens

    return run


@pytest.fixture
async def verifier(target_dir: Path) -> AsyncIterator[Process]:
    """A serving verifier in fp32."""
    async with serving(target_dir, max_sequences=8, max_waiting=1) as process:
        yield process


@contextlib.asynccontextmanager
async def serving(target_dir: Path, step_curve: str | None = None, **fields: Any) -> AsyncIterator[Process]:
    """A serving verifier in fp32 with further settings; with a step curve its passes are stretched."""
    settings = VerifierSettings(
        model=str(target_dir), port=0, metrics_port=None, drain_s=5.0, **{"dtype": "float32", **fields}
    )

    async def build(process: Process) -> None:
        host = await asyncio.to_thread(VerifierHost.load, settings, 1)
        if step_curve is not None:
            stretch(host, step_curve)
        await host.attach(process)

    async with hosted("verifier", settings, build) as process:
        yield process


@pytest.fixture(scope="module")
def engine(target_dir: Path) -> TargetEngine:
    """The engine alone."""
    return TargetEngine.load(target_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def tapped_engine(target_dir: Path) -> TargetEngine:
    """The engine alone, with features of two layers."""
    return TargetEngine.load(target_dir, dtype=torch.float32, taps=[TapSpec((1, 3))])


@pytest.fixture
def drive(tapped_engine: TargetEngine) -> Iterator[Any]:
    """Makes drivers of stepped verifiers: (options of the verifier) -> driver."""
    made: list[Driver] = []

    def make(**options: Any) -> Driver:
        made.append(Driver(tapped_engine, **options))
        return made[-1]

    yield make
    for driver in made:
        driver.verifier.close()
