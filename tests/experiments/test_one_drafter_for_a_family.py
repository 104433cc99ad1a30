"""One PARD directory serves two targets of a family, which share a tokenizer and little else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM

from experiments.equality.decoding import DraftShape, decode
from paceline.methods.loading import load_drafter
from paceline.models import model_fingerprint
from paceline.sampling.params import SamplingParams
from paceline.target import TargetEngine
from tests.methods.conftest import VOCAB, _save_llama
from tests.methods.pard_checkpoint import save

PROMPTS = [[5, 9, 17, 3], [40, 41], list(range(10, 33))]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model, and a deeper one whose further layers change some of its mind."""
    small = _save_llama(tmp_path_factory.mktemp("small"), 2, seed=3)
    large = _save_llama(tmp_path_factory.mktemp("large"), 5, seed=4)
    base = LlamaForCausalLM.from_pretrained(small).state_dict()
    model = LlamaForCausalLM.from_pretrained(large)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in base:
                parameter.copy_(base[name])
            elif "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.1)
    model.save_pretrained(large)
    for path in (small, large):
        vocabulary = {f"t{token}": token for token in range(VOCAB)}
        Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(path / "tokenizer.json"))
    return small, large


def test_one_directory_serves_two_targets(family: tuple[Path, Path], tmp_path: Path) -> None:
    drafter_dir = save(tmp_path, family[0], "pard1")
    (drafter_dir / "model" / "tokenizer.json").write_bytes((family[0] / "tokenizer.json").read_bytes())
    assert model_fingerprint(family[0]) != model_fingerprint(family[1])
    samplings = [SamplingParams(temperature=0.0), *[SamplingParams(temperature=0.6, seed=s) for s in (4, 5)]]
    texts = []
    for target_dir in family:
        drafter = load_drafter(drafter_dir, target_dir, dtype=torch.float32)
        engine = TargetEngine.load(target_dir, dtype=torch.float32)
        plain = decode(engine, PROMPTS, samplings, NUM_TOKENS)
        drafted = decode(engine, PROMPTS, samplings, NUM_TOKENS, drafter, DraftShape(1, 1))
        texts.append([text.tokens for text in drafted])
        assert texts[-1] == [text.tokens for text in plain]
        # Every second token at most can be a draft that was accepted.
        assert sum(text.num_accepted for text in drafted) > len(PROMPTS) * NUM_TOKENS // 4
    assert texts[0] != texts[1]
