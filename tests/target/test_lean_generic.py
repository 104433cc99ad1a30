"""The lean and the generic executor and transformers itself agree, for every family the lean one claims."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.model.weights import UnsupportedModelError
from paceline.target import SequenceRows, TapSpec, TargetEngine
from tests.target.conftest import FAMILIES, GENERIC, SHAPE, ModelFactory

PROMPT = [5, 17, 80, 3, 44, 9, 61, 28, 13, 90, 2, 7]
NUM_NEW = 20


def greedy(engine: TargetEngine) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    slot = engine.open()
    out = engine.step([SequenceRows(slot, PROMPT)])
    first, features = out.logits[0], out.features[0]
    tokens = [int(first[-1].argmax())]
    while len(tokens) < NUM_NEW:
        out = engine.step([SequenceRows.decode(slot, tokens[-1])])
        tokens.append(int(out.logits[0][-1].argmax()))
    engine.close(slot)
    return tokens, first, features


@pytest.mark.parametrize("family", [*FAMILIES, *GENERIC])
def test_executors_agree_with_transformers(tiny_model: ModelFactory, family: str) -> None:
    path = tiny_model(family)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        reference = model(torch.tensor([PROMPT]), output_hidden_states=True)
        full = list(PROMPT)
        for _ in range(NUM_NEW):  # no cache: the plainest loop there is
            full.append(int(model(torch.tensor([full])).logits[0, -1].argmax()))
    tap = TapSpec((0, 2), norm_final=True)
    for executor in ("lean", "generic") if family in FAMILIES else ("auto",):
        engine = TargetEngine.load(path, dtype=torch.float32, executor=executor, taps=[tap])
        tokens, logits, features = greedy(engine)
        torch.testing.assert_close(logits, reference.logits[0], rtol=1e-4, atol=2e-3)
        hidden = reference.hidden_states
        expected = torch.cat([hidden[0][0], hidden[2][0], hidden[-1][0]], dim=-1)
        torch.testing.assert_close(features, expected, rtol=1e-3, atol=1e-3)
        assert tokens == full[len(PROMPT) :], executor


def test_auto_takes_lean_for_the_family_and_generic_beyond(tiny_model: ModelFactory) -> None:
    assert (
        type(TargetEngine.load(tiny_model("qwen3"), dtype=torch.float32).executor).__name__ == "LeanExecutor"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_experts_of_any_width_run_in_any_type(tmp_path: Path, dtype: torch.dtype) -> None:
    """transformers' grouped products need rows of 16 bytes, and no float64."""
    options = {**SHAPE, **GENERIC["deepseek_v3"], "moe_intermediate_size": 20}
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **options)).save_pretrained(tmp_path)
    engine = TargetEngine.load(tmp_path, dtype=dtype, taps=[TapSpec((0, 2), norm_final=True)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, experts_implementation="eager").eval()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0].float()
    _, found, _ = greedy(engine)
    likeness = torch.cosine_similarity(
        found, expected, dim=-1
    )  # bfloat16 sums differ with the rows beside them
    assert bool((likeness > (0.99 if dtype == torch.bfloat16 else 1 - 1e-6)).all())


@pytest.mark.parametrize("change", ["missing", "mismatched"])
def test_a_checkpoint_without_all_weights_is_refused_by_name(
    tiny_model: ModelFactory, tmp_path: Path, change: str
) -> None:
    """transformers warns, and runs random numbers in their place."""
    path, name = tiny_model("deepseek_v3"), "model.layers.1.self_attn.kv_b_proj.weight"
    tensors = load_file(path / "model.safetensors")
    tensors[name] = torch.zeros(2, 2)
    if change == "missing":
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(path / "config.json", tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"{change} keys of DeepseekV3ForCausalLM: .*kv_b_proj"):
        TargetEngine.load(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v32"])
def test_a_state_that_no_draft_can_be_taken_back_from_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """Linear attention keeps a state; an indexer keeps keys of its own and masks by them."""
    config = AutoConfig.for_model(
        kind, **{**SHAPE, **GENERIC["deepseek_v3"], "num_experts": 4, "head_dim": 16}
    )
    if kind == "deepseek_v32":
        config.head_dim = config.qk_rope_head_dim
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"keeps states|does not run over Paceline's attention"):
        TargetEngine.load(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_packed_and_plain_layouts_agree(tiny_model: ModelFactory, family: str) -> None:
    outputs = [
        greedy(
            TargetEngine.load(tiny_model(family), dtype=torch.float32, packed=packed, taps=[TapSpec((0,))])
        )
        for packed in (True, False)
    ]
    assert outputs[0][0] == outputs[1][0]
    torch.testing.assert_close(outputs[0][1], outputs[1][1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_float16_weights_compute_in_float32(tiny_model: ModelFactory, family: str) -> None:
    path = tiny_model(family)
    engine = TargetEngine.load(path, dtype=torch.float16, taps=[TapSpec((1,))])
    assert (engine.weight_dtype, engine.dtype) == (torch.float16, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(parameter.half())
        reference = model(torch.tensor([PROMPT])).logits[0]
    _, logits, features = greedy(engine)
    torch.testing.assert_close(logits, reference, rtol=1e-4, atol=2e-3)
    assert features.dtype == torch.float32


def test_bfloat16_stays_near_float32(tiny_model: ModelFactory) -> None:
    path = tiny_model("llama")
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        engine = TargetEngine.load(path, dtype=dtype)
        logits.append(engine.step([SequenceRows(engine.open(), PROMPT)]).logits[0])
    cosine = torch.nn.functional.cosine_similarity(logits[0], logits[1], dim=-1)
    assert cosine.min() > 0.99


def test_a_family_outside_the_lean_one_runs_generically(tmp_path: object) -> None:
    from transformers import AutoConfig

    options = {**SHAPE, "hidden_size": 96}
    config = AutoConfig.for_model("olmo2", **options)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    model.save_pretrained(tmp_path)
    engine = TargetEngine.load(str(tmp_path), dtype=torch.float32, taps=[TapSpec((0,))])
    assert type(engine.executor).__name__ == "GenericExecutor"
    _, logits, _ = greedy(engine)
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(torch.tensor([PROMPT])).logits[0], rtol=1e-4, atol=1e-3)
