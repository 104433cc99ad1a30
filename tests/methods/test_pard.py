"""PARD and PARD-2 serving: equal to plain transformers and to training, through rejections, batches and wishes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.cpu.executor import NativeExecutor, runs_natively
from paceline.methods.checkpoint import ANY_TARGET, CheckpointError, DrafterConfig, save_drafter
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.methods.loading import drafter_tap, load_drafter
from paceline.methods.pard.checkpoint import PROJECTION, PROJECTION_BIAS
from paceline.methods.pard.drafter import PardDrafter
from paceline.methods.pard2.drafter import Pard2Drafter
from paceline.model.architecture import Architecture
from paceline.models import model_fingerprint
from paceline.target import Device, SequenceRows, StepError, TargetEngine
from tests.methods.conftest import VOCAB, Target, _save_llama, text
from tests.methods.drafting import draft, entry_of, start
from tests.methods.pard_checkpoint import MASK_TOKEN, reference_logits, save

Load = Callable[[Path], Drafter]
METHODS = ["pard1", "pard2"]


@pytest.fixture(params=METHODS)
def checkpoint(request: pytest.FixtureRequest, drafter_dirs: dict[str, Path]) -> Path:
    return drafter_dirs[request.param]


@pytest.fixture
def drafter(load: Load, checkpoint: Path) -> Drafter:
    return load(checkpoint)


def _count_rows(drafter: Drafter) -> list[int]:
    assert isinstance(drafter, PardDrafter)
    rows: list[int] = []
    step = drafter._model.step

    def counting(batch: list[SequenceRows]) -> list[Tensor]:
        rows.append(sum(len(part.tokens) for part in batch))
        return step(batch)

    drafter._model.step = counting  # type: ignore[assignment, method-assign]
    return rows


@pytest.mark.parametrize("length", [1, 2, 9, 33])
@pytest.mark.parametrize("reads_features", [True, False])
def test_chain_equals_reference(
    drafter: Drafter,
    target: Target,
    drafter_dirs: dict[str, Path],
    pard_model_dir: Path,
    length: int,
    reads_features: bool,
) -> None:
    tokens = text(length, seed=length)
    start(drafter, target, 7, tokens)
    entry = entry_of(drafter, 7, 12, reads_features=reads_features)
    features, bias = None, None
    if drafter.tap is not None and reads_features:
        features = target.features(drafter, tokens)[:-1]
        bias = load_file(drafter_dirs["pard2"] / "model.safetensors")[PROJECTION_BIAS]
    logits = reference_logits(pard_model_dir, tokens, 12, features, bias)
    assert list(entry.tokens) == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(entry.log_probs), expected, rtol=1e-3, atol=1e-3)
    assert len(set(entry.tokens)) > 1
    assert MASK_TOKEN not in entry.tokens


def test_features_are_the_states_in_the_tensors_order(
    load: Load, drafter_dirs: dict[str, Path], target_dir: Path, target: Target
) -> None:
    """What enters layers 3 and 1, then the final norm's output; one projected vector of the drafter's width travels."""
    path = drafter_dirs["pard2"]
    tensors = load_file(path / "model.safetensors")
    drafter = load(path)
    tokens = text(9, seed=2)
    model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    with torch.inference_mode():
        states = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    joined = torch.cat([states[3], states[1], states[-1]], dim=-1)[0]
    torch.testing.assert_close(
        target.features(drafter, tokens), joined @ tensors[PROJECTION].T, rtol=1e-4, atol=1e-4
    )
    tap = drafter_tap(path)
    assert tap is not None
    assert tap.width(64) == 64


def test_drafts_depend_on_the_features_only_where_they_are_read(
    load: Load, drafter_dirs: dict[str, Path], target: Target
) -> None:
    drafter, other = load(drafter_dirs["pard2"]), load(drafter_dirs["pard2"])
    tokens = text(14, seed=5)
    start(drafter, target, 1, tokens)
    other.open(1, tokens)
    assert other.draft([DraftRequest(1, 8)]) == [None]  # its features are still on the way
    without = draft(other, 1, 8, reads_features=False)
    plain = load(drafter_dirs["pard1"])
    plain.open(1, tokens)
    assert without == draft(plain, 1, 8)
    with_features = draft(drafter, 1, 8)
    assert with_features != without
    # From one to the other and back: the text is run anew.
    assert draft(drafter, 1, 8, reads_features=False) == without
    assert draft(drafter, 1, 8) == with_features
    # In one batch, each as it asks.
    other.feed(1, 0, target.features(other, tokens)[:-1])
    other.open(2, tokens)
    mixed = other.draft([DraftRequest(1, 8), DraftRequest(2, 8, reads_features=False)])
    assert [entry.tokens for entry in mixed if entry is not None] == [with_features, without]


def test_a_pass_runs_new_rows_alone(drafter: Drafter, target: Target) -> None:
    lengths = {1: 6, 2: 2, 3: 4}
    texts = {1: text(5, 1), 2: text(17, 2), 3: text(30, 3)}
    for key, tokens in texts.items():
        start(drafter, target, key, tokens)
    rows = _count_rows(drafter)
    drafter.draft([DraftRequest(key, lengths[key]) for key in texts])
    drafted = draft(drafter, 2, 10)  # new mask rows, for the tokens that were not wished for
    # The text, and a mask row for each token but the first.
    assert rows == [5 + 5 + 17 + 1 + 30 + 3, 8]
    whole = [*texts[2], *drafted[:3], 7]
    drafter.extend(2, 17, whole[17:])
    drafter.feed(2, 16, target.features(drafter, whole)[16:-1])
    draft(drafter, 2, 5)
    assert rows[2:] == [4 + 4]  # the mask rows fell away, the text's rows stayed


def test_features_are_forgotten_with_their_sequence(
    load: Load, drafter_dirs: dict[str, Path], target: Target
) -> None:
    drafter = load(drafter_dirs["pard2"])
    assert isinstance(drafter, Pard2Drafter)
    start(drafter, target, 1, text(12, seed=6))
    assert drafter._features
    drafter.close(1)
    assert not drafter._features


def test_out_of_positions_drafts_nothing(drafter: Drafter, target: Target) -> None:
    assert drafter.max_positions == 512
    start(drafter, target, 1, text(510, seed=6))
    assert drafter.draft([DraftRequest(1, 3)]) == [None]
    assert len(draft(drafter, 1, 2)) == 2


def test_a_part_of_the_head_is_drafted(
    pard_model_dir: Path, target: Target, load: Load, tmp_path: Path
) -> None:
    ids = torch.tensor([3, 4, *range(10, 40)])
    path = save(tmp_path, pard_model_dir, "pard1", d2t=ids - torch.arange(len(ids)))
    config = json.loads((path / "config.json").read_text())
    config["shape"]["draft_vocab"] = len(ids)
    (path / "config.json").write_text(json.dumps(config))
    drafter, tokens = load(path), text(12, seed=1)
    drafter.open(1, tokens)
    logits = reference_logits(pard_model_dir, tokens, 6)[:, ids]
    assert list(draft(drafter, 1, 6)) == ids[logits.argmax(-1)].tolist()


def test_a_public_directory_serves_any_target(
    pard_model_dir: Path, target_dir: Path, tmp_path: Path, target: Target
) -> None:
    public = tmp_path / "public"
    shutil.copytree(pard_model_dir, public)
    content = json.loads((public / "config.json").read_text()) | {"pard_token": MASK_TOKEN}
    (public / "config.json").write_text(json.dumps(content))
    assert DrafterConfig.read(public) == DrafterConfig("pard1", ANY_TARGET, shape={"mask_token": MASK_TOKEN})
    other_target = _save_llama(tmp_path / "other", 3, seed=8)
    tokens = text(9, seed=3)
    drafted = []
    for directory in (target_dir, other_target):
        drafter = load_drafter(public, directory, dtype=torch.float32)
        assert drafter.method == "pard1"
        drafter.open(1, tokens)
        drafted.append(draft(drafter, 1, 5))
    assert drafted[0] == drafted[1] == tuple(reference_logits(pard_model_dir, tokens, 5).argmax(-1).tolist())
    (public / "config.json").write_text(json.dumps({**content, "pard_token": VOCAB}))
    with pytest.raises(CheckpointError, match=f"mask_token must be a token from 0 to {VOCAB - 1}"):
        load_drafter(public, target_dir)


def test_another_tokenizer_is_refused(pard_model_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    tokenizers = [
        Tokenizer(models.WordLevel({f"{letter}{i}": i for i in range(VOCAB)}, unk_token=f"{letter}0"))
        for letter in "ab"
    ]
    target, drafter = tmp_path / "target", save(tmp_path / "drafter", pard_model_dir, "pard1")
    shutil.copytree(target_dir, target)
    tokenizers[0].save(str(target / "tokenizer.json"))
    tokenizers[0].save(str(drafter / "model" / "tokenizer.json"))
    assert load_drafter(drafter, target).method == "pard1"
    tokenizers[1].save(str(drafter / "model" / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer|in common"):
        load_drafter(drafter, target)


def test_damaged_checkpoints_are_refused_by_name(
    drafter_dirs: dict[str, Path], target_dir: Path, tmp_path: Path
) -> None:
    path = drafter_dirs["pard2"]
    tensors = load_file(path / "model.safetensors")
    config = DrafterConfig.read(path)
    whole = {k: tensors[k] for k in (PROJECTION, PROJECTION_BIAS)}
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)

    def load_with(shape: dict[str, object], beside: dict[str, Tensor]) -> None:
        changed = DrafterConfig("pard2", config.target_fingerprint, "tiny", {**config.shape, **shape})
        save_drafter(broken, changed, beside)
        load_drafter(broken, target_dir)

    load_with({}, whole)
    for shape, beside, message in (
        ({}, {PROJECTION_BIAS: whole[PROJECTION_BIAS]}, "target_proj.weight is missing"),
        ({}, {PROJECTION: whole[PROJECTION]}, "target_proj.bias is missing"),
        ({}, {**whole, PROJECTION: whole[PROJECTION][:, :-1].clone()}, "does not fit 3 taps of 64"),
        ({"proj_bias": False}, {PROJECTION: whole[PROJECTION][:-1].clone()}, "gives 63 wide features"),
        ({"scale": 0}, whole, "shape.scale"),
        ({"tap_layers": [1, -1]}, whole, "shape.tap_layers"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_with(shape, beside)  # type: ignore[arg-type]


def _save_model(path: Path) -> Path:
    """A random model of a shape that the CPU kernels take."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.mark.parametrize("method", METHODS)
def test_the_cpu_kernels_run_all_mask_rows_of_all_sequences_in_one_step(
    method: str, target_dir: Path, target: Target, tmp_path: Path
) -> None:
    model_dir = _save_model(tmp_path / "model")
    path = save(tmp_path / "drafter", model_dir, method, model_fingerprint(target_dir))
    drafter = load_drafter(path, target_dir, dtype=torch.bfloat16)
    assert isinstance(drafter, PardDrafter)
    if not runs_natively(
        Architecture.from_config(LlamaConfig.from_pretrained(model_dir)), Device("cpu"), torch.bfloat16
    ):
        pytest.skip("no CPU kernels here")
    assert isinstance(drafter._engine.executor, NativeExecutor)
    texts = {1: text(5, 1), 2: text(17, 2), 3: text(30, 3)}
    for key, tokens in texts.items():
        start(drafter, target, key, tokens)
    rows = _count_rows(drafter)
    entries = drafter.draft([DraftRequest(key, 6) for key in texts])
    assert rows == [5 + 17 + 30 + 3 * 5]
    bias = load_file(path / "model.safetensors")[PROJECTION_BIAS] if method == "pard2" else None
    for entry, tokens in zip(entries, texts.values(), strict=True):
        features = target.features(drafter, tokens)[:-1] if method == "pard2" else None
        logits = reference_logits(model_dir, tokens, 6, features, bias)
        assert entry is not None
        chosen = logits[torch.arange(6), list(entry.tokens)]
        # bfloat16 may take another of two that are as good as equal.
        assert float((logits.max(-1).values - chosen).max()) < 0.1
        assert float(logits.topk(2).values.diff().abs().max()) > 0.3


@pytest.mark.parametrize("executor", ["lean", "generic", "native"])
def test_what_is_added_to_embeddings_is_the_same_for_every_executor(tmp_path: Path, executor: str) -> None:
    _save_model(tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    dtype = torch.bfloat16 if executor == "native" else torch.float32
    if executor == "native" and not runs_natively(Architecture.from_config(config), Device("cpu"), dtype):
        pytest.skip("no CPU kernels here")
    engine = TargetEngine.load(tmp_path, "cpu", dtype, executor=executor)  # type: ignore[arg-type]
    first, second = text(7, seed=1), text(5, seed=2)
    added = torch.randn(7, 64, generator=torch.Generator().manual_seed(3)) * 0.3
    slots = engine.open(), engine.open()
    ours = engine.step([SequenceRows(slots[0], second), SequenceRows(slots[1], first, added=added)]).logits
    with torch.inference_mode():
        x = model.model.embed_tokens(torch.tensor([first])) + added
        theirs = model(inputs_embeds=x).logits[0]
        plain = model(torch.tensor([second])).logits[0]
        unmoved = model(torch.tensor([first])).logits[0]
    tolerance = 0.08 if executor == "native" else 1e-3
    torch.testing.assert_close(ours[1], theirs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[0], plain, rtol=tolerance, atol=tolerance)
    assert float((theirs - unmoved).abs().max()) > 1.0
    with pytest.raises(StepError, match="added must be"):
        engine.step([SequenceRows(slots[0], [4], added=added)])
