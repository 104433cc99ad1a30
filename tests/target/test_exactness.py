"""Greedy text of the engine equals transformers' own, token for token, in float32 on a real model.

Sequences run alone and in mixtures, prefilled in chunks of odd sizes beside others' decode rows. A difference is
allowed only where the target itself has no clear winner: the top two logits closer than `TIE_GAP`. Such ties are
counted and reported, and after one the rest of that text is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.model.linear import has_half_weight_linear
from paceline.target import SequenceRows, TargetEngine
from paceline.target.executors.backend import ExecutorChoice

TIE_GAP = 1e-4
CHUNKS = (7, 31, 1, 53, 64)
PROMPTS = json.loads(files("paceline.assets").joinpath("prompts.json").read_text(encoding="utf-8"))


@dataclass
class Reference:
    name: str
    prompt: list[int]
    tokens: list[int]
    gaps: list[float]  # difference of the top two logits at each token


@dataclass
class Run:
    """One sequence under the engine, prefilled by chunks and then decoded greedily."""

    slot: int
    pending: list[int]
    limit: int
    tokens: list[int] = field(default_factory=list)
    num_chunks: int = 0

    def rows(self) -> SequenceRows:
        if self.tokens:
            return SequenceRows.decode(self.slot, self.tokens[-1])
        size = CHUNKS[self.num_chunks % len(CHUNKS)]
        self.num_chunks += 1
        chunk, self.pending = self.pending[:size], self.pending[size:]
        return SequenceRows(self.slot, chunk, num_logits="none" if self.pending else "last")

    def take(self, logits: torch.Tensor) -> None:
        if not self.pending:
            self.tokens.append(int(logits[-1].argmax()))


def references(
    model_dir: Path, num_new: int, batch_size: int, rounds_weights: bool = False
) -> list[Reference]:
    """What transformers writes in float32; prompts of similar length share a batch.

    `rounds_weights` rounds all matrices to float16 first, the weights that the engine has in that dtype.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    if rounds_weights:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(parameter.half())
    eos = model.generation_config.eos_token_id
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt["text"]}], add_generation_prompt=True, tokenize=False
        )
        for prompt in PROMPTS
    ]
    found: dict[int, Reference] = {}
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        padded = tokenizer(
            [texts[index] for index in chosen], add_special_tokens=False, padding=True, return_tensors="pt"
        )
        out = model.generate(
            **padded,
            max_new_tokens=num_new,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = torch.stack(out.logits, dim=1).topk(2).values  # [batch, num_new, 2]
        for row, index in enumerate(chosen):
            prompt = padded["input_ids"][row][padded["attention_mask"][row].bool()].tolist()
            tokens = out.sequences[row, padded["input_ids"].shape[1] :].tolist()
            length = tokens.index(eos) + 1 if eos in tokens else len(tokens)
            gaps = (top[row, :, 0] - top[row, :, 1]).tolist()
            found[index] = Reference(PROMPTS[index]["id"], prompt, tokens[:length], gaps)
    return [found[index] for index in range(len(texts))]


def decode(engine: TargetEngine, asked: list[Reference], max_running: int, num_new: int) -> list[list[int]]:
    """All texts, at most `max_running` at a time; a sequence joins as soon as another leaves."""
    waiting = [(index, reference) for index, reference in enumerate(asked)]
    running: dict[int, Run] = {}
    texts: list[list[int]] = [[] for _ in asked]
    while waiting or running:
        while waiting and len(running) < max_running:
            index, reference = waiting.pop(0)
            limit = min(num_new, len(reference.tokens))
            running[index] = Run(engine.open(), list(reference.prompt), limit)
        out = engine.step([run.rows() for run in running.values()])
        for (index, run), logits in zip(list(running.items()), out.logits, strict=True):
            run.take(logits)
            if len(run.tokens) == run.limit:
                texts[index] = run.tokens
                engine.close(run.slot)
                del running[index]
    return texts


def count_ties(asked: list[Reference], texts: list[list[int]]) -> int:
    """Fail at a difference that is no tie; return how many were."""
    ties = 0
    for reference, text in zip(asked, texts, strict=True):
        for position, (expected, got) in enumerate(zip(reference.tokens, text, strict=True)):
            if expected != got:
                gap = reference.gaps[position]
                assert gap < TIE_GAP, f"{reference.name} differs at token {position}, gap {gap}"
                ties += 1
                break
    return ties


RecordProperty = Callable[[str, object], None]


def test_greedy_equals_transformers(smollm2_dir: Path, record_property: RecordProperty) -> None:
    asked = references(smollm2_dir, 16, batch_size=5)
    engine = TargetEngine.load(smollm2_dir, dtype=torch.float32)
    ties = count_ties(asked, decode(engine, asked, max_running=7, num_new=16))
    alone = [asked[index] for index in (0, 10, 16)]  # one of each kind
    ties += count_ties(alone, decode(engine, alone, max_running=1, num_new=16))
    record_property("ties", ties)
    assert ties <= 1
    assert engine.cache.used_bytes == 0


def check_alone_and_together(
    engine: TargetEngine, asked: list[Reference], num_new: int, record_property: RecordProperty
) -> None:
    """Every text among six others, and every third alone: what whole deployments compare covers the rest of those."""
    for max_running, compared in ((1, asked[::3]), (7, asked)):
        ties = count_ties(compared, decode(engine, compared, max_running, num_new))
        record_property(f"ties at {max_running} sequences", ties)
        assert ties <= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not has_half_weight_linear(), reason="this build multiplies no float16 weights on CPU")
def test_float16_weights_are_as_exact_as_float32(smollm2_dir: Path, record_property: RecordProperty) -> None:
    asked = references(smollm2_dir, 32, batch_size=5, rounds_weights=True)
    engine = TargetEngine.load(smollm2_dir, dtype=torch.float16)
    check_alone_and_together(engine, asked, 32, record_property)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("executor", "num_new"), [("lean", 32), ("generic", 12)])
def test_greedy_equals_transformers_at_length(
    smollm2_dir: Path, executor: ExecutorChoice, num_new: int, record_property: RecordProperty
) -> None:
    asked = references(smollm2_dir, num_new, batch_size=5)
    assert sum(len(reference.tokens) for reference in asked) > num_new * 16
    engine = TargetEngine.load(smollm2_dir, dtype=torch.float32, executor=executor)
    check_alone_and_together(engine, asked, num_new, record_property)
