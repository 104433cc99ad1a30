"""The native executor: as near to float32 as torch's bfloat16 is, and each row the same whatever runs beside it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.cpu import kernels
from paceline.cpu.operation import Epilogue
from paceline.cpu.packed_weight import PackedWeight
from paceline.cpu.program import Program
from paceline.cpu.row_segment import RowSegment
from paceline.sampling.rows import maxima_of
from paceline.target import SequenceRows, TapSpec, TargetEngine, UnsupportedModelError
from tests.target.conftest import FAMILIES, SHAPE

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="the CPU kernels do not run here")

NATIVE_FAMILIES = [family for family in FAMILIES if family != "gemma2"]  # its scores are capped
TEXT = torch.randint(3, 97, (120,), generator=torch.Generator().manual_seed(3)).tolist()
TAP = TapSpec((0, 2), norm_final=True)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small model per family, with widths that the kernels take and weights that bfloat16 holds."""
    made = {}
    for family in FAMILIES:
        options: dict[str, Any] = {**SHAPE, "hidden_size": 96, "intermediate_size": 112, "head_dim": 32}
        options |= FAMILIES[family]
        config = AutoConfig.for_model(options.pop("model_type", family), **options)
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.normal_(0.0, 0.2).add_(0.0 if "gemma" in family or "bias" in name else 1.0)
        made[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(made[family])
    return made


@pytest.fixture(scope="module")
def engines(model_dirs: dict[str, Path]) -> dict[str, TargetEngine]:
    return {
        family: TargetEngine.load(model_dirs[family], dtype=torch.bfloat16, executor="native", taps=[TAP])
        for family in NATIVE_FAMILIES
    }


def run(engine: TargetEngine, chunks: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features of a text that goes in by chunks."""
    slot = engine.open()
    outputs = [engine.step([SequenceRows(slot, chunk)]) for chunk in chunks]
    engine.close(slot)
    return torch.cat([x.logits[0] for x in outputs]), torch.cat([x.features[0] for x in outputs])


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_as_near_to_float32_as_torch(
    model_dirs: dict[str, Path], engines: dict[str, TargetEngine], family: str
) -> None:
    path = model_dirs[family]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        exact = model.eval()(torch.tensor([TEXT]), output_hidden_states=True)
    lean = TargetEngine.load(path, dtype=torch.bfloat16, executor="lean", taps=[TAP])
    native_logits, native_features = run(engines[family], [TEXT])
    lean_logits, lean_features = run(lean, [TEXT])
    hidden = exact.hidden_states
    features = torch.cat([hidden[0][0], hidden[2][0], hidden[-1][0]], dim=-1)
    for native, torch_own, expected in (
        (native_logits, lean_logits, exact.logits[0]),
        (native_features, lean_features, features),
    ):
        own = (native.float() - expected).square().mean().sqrt()
        other = (torch_own.float() - expected).square().mean().sqrt()
        assert own <= 1.2 * other
        assert own < 0.15 * expected.square().mean().sqrt()


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
@given(cuts=st.sets(st.integers(1, len(TEXT) - 1), max_size=12))
@settings(max_examples=15, deadline=None)
def test_chunks_do_not_show(engines: dict[str, TargetEngine], family: str, cuts: set[int]) -> None:
    whole_logits, whole_features = run(engines[family], [TEXT])
    bounds = [0, *sorted(cuts), len(TEXT)]
    chunks = [TEXT[first:end] for first, end in pairwise(bounds)]
    logits, features = run(engines[family], chunks)
    assert torch.equal(logits, whole_logits)
    assert torch.equal(features, whole_features)


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_trees_and_company_do_not_show(
    engines: dict[str, TargetEngine], family: str, data: st.DataObject
) -> None:
    engine = engines[family]
    past = data.draw(st.integers(1, 70))
    count = data.draw(st.integers(1, 30))
    parents = [-1, *(data.draw(st.integers(0, node)) for node in range(count - 1))]
    tokens = data.draw(st.lists(st.integers(3, 96), min_size=count, max_size=count))
    others = data.draw(st.lists(st.integers(1, 9), max_size=4))
    slot, company = engine.open(), [engine.open() for _ in others]
    engine.step([SequenceRows(slot, TEXT[:past])])
    rows = [SequenceRows(other, TEXT[:n]) for other, n in zip(company, others, strict=True)]
    place = data.draw(st.integers(0, len(rows)))
    rows.insert(place, SequenceRows(slot, tokens, parents))
    verified = engine.step(rows).logits[place]
    for closed in (slot, *company):
        engine.close(closed)
    leaf = data.draw(st.integers(0, count - 1))
    path = [leaf]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    path.reverse()
    alone, _ = run(engine, [TEXT[:past], *([tokens[node]] for node in path)])
    assert torch.equal(verified[path], alone[past:])


def test_threads_and_buckets_do_not_show(model_dirs: dict[str, Path]) -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads, buckets in ((1, ()), (2, ()), (2, (8, 32, 128))):
            torch.set_num_threads(threads)
            engine = TargetEngine.load(
                model_dirs["llama"], dtype=torch.bfloat16, executor="native", row_buckets=buckets
            )
            slot = engine.open()
            parts = [engine.step([SequenceRows(slot, TEXT[i : i + 30])]).logits[0] for i in (0, 30, 60, 90)]
            results.append(torch.cat(parts))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_where_weights_lie_does_not_show(
    engines: dict[str, TargetEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows are padded where weights are streamed from memory, and are not where a cache holds them."""
    for num_rows in (1, 2, 3, 4, 5, 6, 7):
        chunks = [TEXT[i : i + num_rows] for i in range(0, 42, num_rows)]
        found = []
        for limit in (1 << 30, -1):
            monkeypatch.setattr("paceline.cpu.program.RESIDENT_BYTES", limit)
            found.append(run(engines["llama"], chunks))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_maxima_are_those_of_the_logits(engines: dict[str, TargetEngine], family: str) -> None:
    """In the order of the batch, also when some rows' logits are not asked for."""
    engine = engines[family]
    slots = [engine.open() for _ in range(3)]
    batch = [SequenceRows(slot, TEXT[: 3 + i], num_logits=[0, 2]) for i, slot in enumerate(slots)]
    output = engine.step([batch[2], batch[0], batch[1]])
    for slot in slots:
        engine.close(slot)
    assert output.maxima is not None
    for logits, maxima in zip(output.logits, output.maxima, strict=True):
        assert torch.equal(maxima, maxima_of(logits))


def test_a_broken_logit_shows_in_its_maximum() -> None:
    weight = torch.zeros(70, 16, dtype=torch.bfloat16)
    weight[40, 3], weight[65, 3] = torch.nan, -torch.inf
    program = Program()
    source, out = program.buffer(16, bound=True), program.buffer(70, bound=True)
    found = program.buffer(3, bound=True)
    program.linear(source, out, PackedWeight.pack(weight), Epilogue.STORE_FLOAT, maxima=found)
    rows, logits, maxima = torch.ones(2, 16).bfloat16(), torch.empty(2, 70), torch.empty(2, 3)
    program.run([], [0, 0], {source: rows, out: logits, found: maxima})
    torch.testing.assert_close(maxima, torch.tensor([[0, torch.nan, 0]] * 2), equal_nan=True)


def test_embed_and_head_are_the_models(model_dirs: dict[str, Path], engines: dict[str, TargetEngine]) -> None:
    for family in ("llama", "gemma3_text"):
        lean = TargetEngine.load(model_dirs[family], dtype=torch.bfloat16, executor="lean")
        assert torch.equal(engines[family].embed(TEXT), lean.embed(TEXT))
        states = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
        torch.testing.assert_close(engines[family].head(states), lean.head(states), rtol=0.02, atol=0.02)


def test_chosen_where_it_runs(model_dirs: dict[str, Path]) -> None:
    def chosen(family: str, **options: Any) -> str:
        return type(TargetEngine.load(model_dirs[family], **options).executor).__name__

    assert chosen("llama", dtype=torch.bfloat16) == "NativeExecutor"
    assert chosen("llama", dtype=torch.float32) == "LeanExecutor"
    assert chosen("llama", dtype=torch.bfloat16, packed=False) == "LeanExecutor"
    assert chosen("gemma2", dtype=torch.bfloat16) == "LeanExecutor"
    with pytest.raises(UnsupportedModelError, match="kernels"):
        chosen("gemma2", dtype=torch.bfloat16, executor="native")


def test_the_kernels_are_never_sent_out_of_range() -> None:
    """The engine checks first; this is the last line before memory that is not ours."""
    program = Program()
    hidden = program.buffer(32, bound=True)
    program.embed(torch.zeros(5, 32, dtype=torch.bfloat16), hidden)
    out = {hidden: torch.empty(2, 32, dtype=torch.bfloat16)}
    positions = [0, 0]
    program.run([], positions, out, tokens=[0, 4])
    for tokens in ([0, 5], [-1, 0]):
        with pytest.raises(IndexError, match="token"):
            program.run([], positions, out, tokens=tokens)
    with pytest.raises(IndexError, match="selected"):
        program.run([], positions, out, tokens=[0, 4], selected=[2])
    with pytest.raises(ValueError, match="dense rows of 32"):
        program.run([], positions, {hidden: torch.empty(2, 16, dtype=torch.bfloat16)}, tokens=[0, 4])
    with pytest.raises(KeyError):
        program.run([], positions, {}, tokens=[0, 4])
    storage = torch.zeros(1, 2, 4, 32, dtype=torch.bfloat16)
    with pytest.raises(IndexError, match="slot"):
        program.run([RowSegment(storage, 2, 3)], positions, out, tokens=[0, 4])


def test_a_row_may_be_asked_for_more_than_once(engines: dict[str, TargetEngine]) -> None:
    engine = engines["llama"]
    slot = engine.open()
    many = engine.step([SequenceRows(slot, TEXT[:2], num_logits=[1, 0] * 200)]).logits[0]
    whole, _ = run(engine, [TEXT[:2]])
    engine.close(slot)
    assert torch.equal(many, whole[[1, 0] * 200])


def test_scratch_is_for_products_alone() -> None:
    """A wide vocabulary that is only ranked must not make a long prompt's scratch as wide."""
    program = Program()
    logits, out = program.buffer(5000, bound=True), program.buffer(2, bound=True)
    program.top(logits, out, 1)
    ranked = torch.empty(1, 2, dtype=torch.int32)
    program.run([], [0], {logits: torch.randn(1, 5000), out: ranked}, selected=[0])
    assert program._workspace.scratch.numel() == 0


@pytest.mark.parametrize("width", [16, 97, 7680])
def test_the_likeliest_are_found(width: int) -> None:
    program = Program()
    source, out = program.buffer(width, bound=True), program.buffer(16, bound=True)
    program.top(source, out, 8)
    logits = torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * 4
    logits[3] = logits[3].round()  # ties: the first of equals
    ranked = torch.empty(5, 16, dtype=torch.int32)
    program.run([], [0] * 5, {source: logits, out: ranked}, selected=range(5))
    for row, (values, found) in enumerate(zip(logits.tolist(), ranked, strict=True)):
        expected = sorted(range(width), key=lambda index: (-values[index], index))[:8]
        assert found[:8].tolist() == expected
        log_probs = logits[row].log_softmax(-1)[expected]
        torch.testing.assert_close(found[8:].view(torch.float32), log_probs, rtol=1e-5, atol=2e-5)
