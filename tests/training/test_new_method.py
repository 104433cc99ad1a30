"""A new method is a package and one line: a toy is trained, exported, imported and served like any other.

The package is `tests/methods/bigram`. Nothing here is a stand-in: the commands, the loader and the verifier are the
real ones, and find the method in the registry alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.cli import main
from paceline.drafts import DrawRule
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.methods.method import Method
from paceline.methods.registry import METHODS, register
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.target import SequenceRows, TargetEngine
from paceline.training.data import Corpus, DataPosition
from paceline.v1 import peer_pb2
from tests.verifier.conductor import Conductor
from tests.verifier.conftest import serving

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def method() -> Iterator[Method]:
    """What one more line in the registry does."""
    yield register("tests.methods.bigram")
    del METHODS["bigram"]


@pytest.fixture(scope="module")
def drafter_dir(
    method: Method,
    target_dir: Path,
    text_dir: Path,
    heldout_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Trained by the command."""
    out = tmp_path_factory.mktemp("bigram")
    places = {"model": target_dir, "data": text_dir, "heldout": heldout_dir, "run": out / "run"}
    words = [word for name, place in places.items() for word in (f"--{name}-dir", str(place))]
    words += [
        "--export-dir",
        str(out / "drafter"),
        "--num-steps",
        "150",
        "--eval-every",
        "50",
        "--rank",
        "32",
    ]
    words += ["--learning-rate", "0.05", "--batch-tokens", "288", "--dtype", "float32", "--num-threads", "1"]
    with pytest.raises(SystemExit) as caught:
        main(["train", method.name, *words])
    assert not caught.value.code
    return out / "drafter"


@pytest.fixture(scope="module")
def prompt(text_dir: Path) -> list[int]:
    """The beginning of a text that the target wrote."""
    batch = next(Corpus(text_dir, 288, 1).batches(DataPosition()))
    length = int(batch.is_answer[0].int().argmax()) + 4
    tokens: list[int] = batch.tokens[0, :length].tolist()
    return tokens


def test_it_learned_something(drafter_dir: Path) -> None:
    training = json.loads((drafter_dir / "config.json").read_text())["training"]
    assert training["heldout_mean_accepted_of_5"] > 0.05


def test_it_drafts_under_every_rule(drafter_dir: Path, target_dir: Path, prompt: list[int]) -> None:
    drafter = load_drafter(drafter_dir, target_dir, dtype=torch.float32)
    assert drafter.method == "bigram"
    drafter.open(1, prompt)
    (chain,) = drafter.draft([DraftRequest(1, 4)])
    assert chain is not None
    assert (chain.start, chain.parents) == (len(prompt), (-1, 0, 1, 2))
    coupled = SamplingParams(temperature=1.0, seed=3)
    (raced,) = drafter.draft([DraftRequest(1, 4, sampling=coupled)])
    assert raced is not None
    assert len(raced.tokens) == 4
    drawn = SamplingParams(temperature=1.0, seed=3, mode=VerifyMode.REJECTION)
    (draws,) = drafter.draft([DraftRequest(1, 3, 6, drawn, DrawRule.WITHOUT_REPLACEMENT)])
    assert draws is not None
    assert len(draws.tokens) == 6
    drafter.extend(1, len(prompt), chain.tokens[:2])
    (further,) = drafter.draft([DraftRequest(1, 2)])
    assert further is not None
    assert further.tokens == chain.tokens[2:]


def test_its_public_layout_goes_there_and_back(drafter_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    from paceline.checkpoints import export_checkpoint, import_checkpoint

    export_checkpoint(drafter_dir, "bigram_tables", tmp_path / "public")
    config = import_checkpoint(tmp_path / "public", target_dir, tmp_path / "again")
    assert config.method == "bigram"
    first, second = (load_file(path / "model.safetensors") for path in (drafter_dir, tmp_path / "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first.keys() == second.keys()


async def test_beside_the_target_its_tokens_are_accepted_and_the_text_is_plain_decoding_s(
    drafter_dir: Path, target_dir: Path, prompt: list[int]
) -> None:
    engine = TargetEngine.load(target_dir, dtype=torch.float32)
    slot, plain, rows = engine.open(), list[int](), prompt
    while len(plain) < NUM_TOKENS:
        logits = engine.step([SequenceRows(slot, rows, num_logits="last")]).logits[0]
        rows = [int(logits[-1].argmax())]
        plain += rows
    async with serving(target_dir, drafter=drafter_dir) as process, Conductor(process.port) as conductor:
        policy = peer_pb2.StepPolicy(
            version=1, max_nodes_per_step=64, max_nodes_per_sequence=8, draft_length=4
        )
        await conductor.send(policy=policy)
        sequence_id = await conductor.open(prompt, NUM_TOKENS)
        (text,) = await asyncio.wait_for(conductor.finish(sequence_id), 30)
        assert text == plain
        assert conductor.num_accepted > 0
