"""DFlash serving: equal to a slow reference and to its training objective, through rejections, batches and wishes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.methods.block_diffusion.layer import BlockRows
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, save_drafter
from paceline.methods.dflash.drafter import DFlashDrafter
from paceline.methods.dflash.objective import DFlashObjective
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.methods.loading import load_drafter
from paceline.models import model_fingerprint
from paceline.training.data import Batch
from paceline.training.objective import TargetReference
from tests.methods.conftest import DFLASH_SHAPE as SHAPE
from tests.methods.conftest import DRAFT_IDS, TAP_LAYERS, VOCAB, Target, text
from tests.methods.dflash_checkpoint import random_tensors, reference_states, save
from tests.methods.drafting import draft, entry_of, start

Load = Callable[[Path], Drafter]
LAYOUTS = {
    "infilling": SHAPE,
    "anchor_first": replace(SHAPE, anchor_first=True),
    "plain_heads": replace(SHAPE, head_norms=False),
}


@pytest.fixture(scope="module")
def embedding(target_dir: Path) -> Tensor:
    """The target's, which is its head too."""
    model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    return model.model.embed_tokens.weight.detach()


@pytest.fixture
def drafter(load: Load, dflash_dir: Path) -> DFlashDrafter:
    drafter = load(dflash_dir)
    assert isinstance(drafter, DFlashDrafter)
    return drafter


def _count_context(drafter: DFlashDrafter) -> list[list[int]]:
    """New context rows of each sequence in every pass from now on."""
    seen: list[list[int]] = []
    forward = drafter._blocks.forward

    def counting(rows: list[BlockRows]) -> Tensor:
        seen.append([part.context.shape[0] for part in rows])
        return forward(rows)

    drafter._blocks.forward = counting  # type: ignore[method-assign, assignment]
    return seen


@pytest.mark.parametrize("length", [2, 9, 33])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chain_equals_reference(
    load: Load, target: Target, target_dir: Path, embedding: Tensor, tmp_path: Path, length: int, layout: str
) -> None:
    shape = LAYOUTS[layout]
    tensors = random_tensors(shape, DRAFT_IDS, seed=5)
    drafter = load(save(tmp_path, shape, tensors, model_fingerprint(target_dir), TAP_LAYERS, 64))
    tokens = text(length, seed=length)
    start(drafter, target, 7, tokens)
    entry = entry_of(drafter, 7, 10)
    states = reference_states(shape, tensors, embedding, target.taps(tokens)[:-1], tokens)
    logits = states @ embedding[DRAFT_IDS].T
    assert len(entry.tokens) == (7 if layout == "anchor_first" else 6)
    assert list(entry.tokens) == [DRAFT_IDS[i] for i in logits.argmax(-1).tolist()]
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(entry.log_probs), expected, rtol=1e-3, atol=1e-3)
    assert len(set(entry.tokens)) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_serving_equals_the_training_mask_of_the_last_anchor(
    load: Load, target: Target, target_dir: Path, embedding: Tensor, tmp_path: Path, layout: str
) -> None:
    shape = LAYOUTS[layout]
    tensors = random_tensors(shape, DRAFT_IDS, seed=5)
    drafter = load(save(tmp_path, shape, tensors, model_fingerprint(target_dir), TAP_LAYERS, 64))
    assert isinstance(drafter, DFlashDrafter)
    tokens = text(20, seed=3)
    start(drafter, target, 1, tokens)
    draft(drafter, 1, 6)
    block = drafter._sequences[1].round
    served = torch.cat([block.state(depth) for depth in range(shape.num_drafts)])
    # What stands behind the anchor is unknown to serving, and must not matter; nor must other anchors' blocks.
    whole = torch.tensor([[*tokens, *text(7, seed=30)]])
    batch = Batch(
        tokens=whole,
        top_tokens=torch.zeros_like(whole),
        is_answer=torch.ones_like(whole, dtype=torch.bool),
        is_greedy=torch.ones(1, dtype=torch.bool),
        lengths=torch.tensor([whole.shape[1]]),
        taps=target.taps(whole[0].tolist())[None],
        hidden=None,
    )
    objective = DFlashObjective(
        shape,
        {k: tensors[k] for k in shape.parameter_shapes()},
        embedding,
        embedding,
        torch.tensor(DRAFT_IDS),
        torch.ones(3 * 64),
        TargetReference("", "tiny", tuple(TAP_LAYERS), 64),
        dtype=torch.float32,
    )
    with torch.no_grad():
        out = objective.forward(objective.compute_weights(), batch, torch.tensor([[4, 19, 24]]))
    torch.testing.assert_close(served, out[0, 1], rtol=1e-4, atol=1e-3)


def test_a_pass_runs_new_context_alone(drafter: DFlashDrafter, target: Target) -> None:
    texts = {1: text(5, 1), 2: text(17, 2), 3: text(30, 3)}
    for key, tokens in texts.items():
        start(drafter, target, key, tokens)
    seen = _count_context(drafter)
    drafter.draft([DraftRequest(key, 4) for key in texts])
    drafted = draft(drafter, 2, 6)  # a longer wish runs nothing: a pass has the whole block
    assert draft(drafter, 2, 10) == drafted  # no more than a block has
    assert len(drafted) == drafter.longest_draft
    assert seen == [[4, 16, 29]]
    whole = [*texts[2], *drafted[:3], 5]
    drafter.extend(2, 17, whole[17:])
    drafter.feed(2, 16, target.features(drafter, whole)[16:-1])
    draft(drafter, 2, 4)
    assert seen[1:] == [[4]]  # the rest of the context is in the cache


def test_out_of_positions_drafts_nothing(drafter: DFlashDrafter, target: Target) -> None:
    tokens = text(59, seed=6)
    start(drafter, target, 1, tokens[:58])  # rows 57 to 63 of 64 positions
    assert len(draft(drafter, 1, 6)) == 6
    start(drafter, target, 2, tokens)
    assert drafter.draft([DraftRequest(2, 1)]) == [None]


def test_own_embedding_and_head_over_the_whole_vocabulary(
    target_dir: Path, target: Target, load: Load, tmp_path: Path
) -> None:
    shape = replace(SHAPE, draft_vocab=VOCAB)
    random = torch.Generator().manual_seed(2)
    tensors = random_tensors(shape, list(range(VOCAB)), seed=6)
    embedding, head = torch.randn(2, VOCAB, 64, generator=random)
    own = {**tensors, "embed_tokens.weight": embedding, "lm_head.weight": head}
    save(tmp_path, shape, own, model_fingerprint(target_dir), TAP_LAYERS, 64)
    config = DrafterConfig.read(tmp_path)
    save_drafter(
        tmp_path, replace(config, shape={**config.shape, "has_embedding": True, "has_head": True}), own
    )
    drafter = load(tmp_path)
    assert isinstance(drafter, DFlashDrafter)
    assert drafter._draft_ids is None
    tokens = text(10, seed=1)
    start(drafter, target, 1, tokens)
    states = reference_states(shape, tensors, embedding, target.taps(tokens)[:-1], tokens)
    assert list(draft(drafter, 1, 6)) == (states @ head.T).argmax(-1).tolist()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mask_token": VOCAB}, "mask_token"),
        ({"block_size": 1}, "block_size 1 leaves nothing"),
        ({"target_hidden": 32}, "must equal"),
        ({"anchor_first": 1}, "anchor_first"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(
    dflash_dir: Path,
    dflash_tensors: dict[str, Tensor],
    target_dir: Path,
    tmp_path: Path,
    change: dict[str, object],
    said: str,
) -> None:
    config = DrafterConfig.read(dflash_dir)
    save_drafter(tmp_path, replace(config, shape={**config.shape, **change}), dflash_tensors)
    with pytest.raises(CheckpointError, match=said):
        load_drafter(tmp_path, target_dir)


def test_damaged_tensors_are_refused_by_name(
    dflash_dir: Path, dflash_tensors: dict[str, Tensor], target_dir: Path, tmp_path: Path
) -> None:
    broken = {k: v for k, v in dflash_tensors.items() if k != "hidden_norm.weight"}
    broken["layers.1.mlp.up_proj.weight"] = broken["layers.1.mlp.up_proj.weight"][:, :-1]
    save_drafter(tmp_path, DrafterConfig.read(dflash_dir), broken)
    with pytest.raises(
        CheckpointError, match=r"hidden_norm\.weight is missing.*layers\.1\.mlp\.up_proj\.weight has shape"
    ):
        load_drafter(tmp_path, target_dir)


def test_features_take_the_sheets_bytes(drafter: DFlashDrafter) -> None:
    """One fused feature of the target's width for every committed token, not its streams."""
    assert drafter.tap is not None
    assert drafter.tap.width(SHAPE.target_hidden) == SHAPE.hidden
    assert drafter.tap.num_sources == 3


def test_shapes_count_as_the_public_checkpoint() -> None:
    """Five layers have 58 tensors, embedding and head not among them."""
    assert len(replace(SHAPE, num_layers=5).parameter_shapes()) == 58
