"""Chains, trees, rollbacks and mixtures equal a fresh forward pass over the accepted path."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.target import SequenceRows, TapSpec, TargetEngine
from tests.target.conftest import SHAPE, ModelFactory

VOCAB = SHAPE["vocab_size"]
LAYERS = SHAPE["num_hidden_layers"]
engines: dict[tuple[str, tuple[int, ...]], TargetEngine] = {}


def engine_of(tiny_model: ModelFactory, family: str, row_buckets: tuple[int, ...] = ()) -> TargetEngine:
    key = (family, row_buckets)
    if key not in engines:
        engines[key] = TargetEngine.load(
            tiny_model(family),
            dtype=torch.float64,
            taps=[TapSpec((1, LAYERS), norm_final=True)],
            row_buckets=row_buckets,
        )
    return engines[key]


@dataclass
class Sequence:
    """A model of one sequence: what its slot must hold."""

    slot: int
    settled: list[int] = field(default_factory=list)


def path_to(parents: list[int], row: int) -> list[int]:
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "deepseek_v3-dense"])
@pytest.mark.parametrize("row_buckets", [(), (8, 16)])
def test_any_program_of_steps_equals_fresh_forwards(
    tiny_model: ModelFactory, family: str, row_buckets: tuple[int, ...], data: st.DataObject
) -> None:
    engine = engine_of(tiny_model, family, row_buckets)
    opened = [Sequence(engine.open()) for _ in range(data.draw(st.integers(1, 3), label="sequences"))]
    token = st.integers(0, VOCAB - 1)
    try:
        for _ in range(data.draw(st.integers(1, 5), label="steps")):
            chosen = data.draw(
                st.lists(st.sampled_from(range(len(opened))), min_size=1, unique=True),
                label="sequences of step",
            )
            batch, trees = [], []
            for index in chosen:
                count = data.draw(st.integers(1, 9), label="rows")
                tokens = data.draw(st.lists(token, min_size=count, max_size=count), label="tokens")
                if data.draw(st.booleans(), label="tree"):
                    parents = [-1] + [data.draw(st.integers(-1, row - 1)) for row in range(1, count)]
                    batch.append(SequenceRows(opened[index].slot, tokens, parents))
                else:
                    parents = list(range(-1, count - 1))
                    batch.append(SequenceRows(opened[index].slot, tokens))
                trees.append(parents)
            out = engine.step(batch)
            for position, index in enumerate(chosen):
                sequence, parents, tokens = opened[index], trees[position], batch[position].tokens
                row = data.draw(st.integers(0, len(tokens) - 1), label="row to check")
                path = path_to(parents, row)
                fresh = engine.open()
                expected = engine.step([SequenceRows(fresh, sequence.settled + [tokens[r] for r in path])])
                engine.close(fresh)
                torch.testing.assert_close(
                    out.logits[position][row], expected.logits[0][-1], rtol=0, atol=2e-5
                )
                torch.testing.assert_close(
                    out.features[position][path],
                    expected.features[0][len(sequence.settled) :],
                    rtol=1e-9,
                    atol=1e-9,
                )
                kept = path[: data.draw(st.integers(0, len(path)), label="kept")]
                engine.keep(sequence.slot, kept)
                sequence.settled += [tokens[r] for r in kept]
                if data.draw(st.booleans(), label="truncate"):
                    length = data.draw(st.integers(0, len(sequence.settled)))
                    engine.truncate(sequence.slot, length)
                    del sequence.settled[length:]
                assert engine.length(sequence.slot) == len(sequence.settled)
    finally:
        for sequence in opened:
            engine.close(sequence.slot)
    assert engine.cache.used_bytes == 0


def test_long_prefill_chunks_and_growth_equal_one_pass(tiny_model: ModelFactory) -> None:
    for family in ("llama", "gemma3_text", "mistral"):
        engine = engine_of(tiny_model, family)
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, VOCAB, (211,), generator=generator).tolist()
        whole, chunked = engine.open(), engine.open()
        expected = engine.step([SequenceRows(whole, tokens)]).logits[0]
        got, first = [], 0
        for size in (1, 97, 3, 64, 46):
            rows = SequenceRows(chunked, tokens[first : first + size])
            got.append(engine.step([rows]).logits[0])
            first += size
        assert first == len(tokens)
        torch.testing.assert_close(torch.cat(got), expected, rtol=0, atol=1e-5)
        engine.close(whole)
        engine.close(chunked)
