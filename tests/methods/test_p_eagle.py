"""P-EAGLE serving: equal to a slow reference and to its training objective, through rejections, batches and wishes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.draft_layer import LayerOutput
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, save_drafter
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.methods.loading import load_drafter
from paceline.methods.one_pass.marginal_tree import marginal_tree
from paceline.methods.one_pass.rows import FlatRows, all_rows
from paceline.methods.p_eagle.drafter import PEagleDrafter
from paceline.methods.p_eagle.objective import PEagleObjective, PEagleShape
from paceline.models import model_fingerprint
from paceline.training.data import Batch
from paceline.training.objective import TargetReference
from tests.methods.conftest import DRAFT_IDS, TAP_LAYERS, VOCAB, Target, text
from tests.methods.conftest import P_EAGLE_SHAPE as SHAPE
from tests.methods.drafting import draft, entry_of, start
from tests.methods.p_eagle_checkpoint import random_tensors, reference_logits, save

Load = Callable[[Path], Drafter]


@pytest.fixture(scope="module")
def tensors(p_eagle_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return p_eagle_tensors


@pytest.fixture(scope="module")
def checkpoint(p_eagle_dir: Path) -> Path:
    return p_eagle_dir


@pytest.fixture
def drafter(load: Load, checkpoint: Path) -> PEagleDrafter:
    drafter = load(checkpoint)
    assert isinstance(drafter, PEagleDrafter)
    return drafter


def _count_rows(drafter: PEagleDrafter) -> list[int]:
    rows: list[int] = []
    forward = drafter._layer.forward

    def counting(parts: object, wanted: object) -> LayerOutput:
        output = forward(parts, wanted)  # type: ignore[arg-type]
        rows.append(output.states.shape[0])
        return output

    drafter._layer.forward = counting  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("length", [2, 9, 33])
def test_chain_equals_reference(
    drafter: PEagleDrafter, target: Target, tensors: dict[str, Tensor], length: int
) -> None:
    tokens = text(length, seed=length)
    start(drafter, target, 7, tokens)
    entry = entry_of(drafter, 7, 6)
    logits = reference_logits(SHAPE, tensors, target.taps(tokens)[:-1], tokens, 6)
    assert list(entry.tokens) == [DRAFT_IDS[i] for i in logits.argmax(-1).tolist()]
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(entry.log_probs), expected, rtol=1e-3, atol=1e-3)
    assert len(set(entry.tokens)) > 2


def test_serving_equals_the_training_mask_of_the_last_anchor(
    drafter: PEagleDrafter, target: Target, tensors: dict[str, Tensor]
) -> None:
    tokens = text(20, seed=3)
    start(drafter, target, 1, tokens)
    draft(drafter, 1, 6)
    served = drafter._sequences[1].round.logits(0, 6)
    # What stands behind the root is unknown to serving, and must not matter to training's rows of that anchor.
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
    objective = PEagleObjective(
        SHAPE,
        {k: tensors[k] for k in SHAPE.parameter_shapes()},
        torch.zeros(VOCAB, 64),
        torch.tensor(DRAFT_IDS),
        torch.ones(3 * 64),
        TargetReference("", "tiny", tuple(TAP_LAYERS), 64),
        dtype=torch.float32,
    )
    rows = all_rows(whole.shape[1], SHAPE.num_depths)
    flat = FlatRows.pad([rows], [torch.ones(rows.shape[1], dtype=torch.bool)])
    with torch.no_grad():
        out = objective.forward(objective.compute_weights(), batch, flat)[0]
    trained = out[rows[0] == len(tokens) - 2] @ tensors["lm_head.weight"].T
    torch.testing.assert_close(served, trained, rtol=1e-4, atol=1e-3)


def test_a_pass_runs_new_rows_alone(drafter: PEagleDrafter, target: Target) -> None:
    lengths = {1: 6, 2: 2, 3: 4}
    texts = {1: text(5, 1), 2: text(17, 2), 3: text(30, 3)}
    for key, tokens in texts.items():
        start(drafter, target, key, tokens)
    rows = _count_rows(drafter)
    drafter.draft([DraftRequest(key, lengths[key]) for key in texts])
    drafted = draft(drafter, 2, 5)  # new mask rows, for the tokens that were not wished for
    # True rows, and a mask row for each token but the first.
    assert rows == [4 + 5 + 16 + 1 + 29 + 3, 3]
    whole = [*texts[2], *drafted[:3], 5]
    drafter.extend(2, 17, whole[17:])
    drafter.feed(2, 16, target.features(drafter, whole)[16:-1])
    draft(drafter, 2, 4)
    assert rows[2:] == [4 + 3]  # the mask rows fell away, the true ones stayed


def test_out_of_positions_drafts_nothing(drafter: PEagleDrafter, target: Target) -> None:
    start(drafter, target, 1, text(62, seed=6))
    assert drafter.draft([DraftRequest(1, 3)]) == [None]
    assert len(draft(drafter, 1, 2)) == 2


def test_marginal_tree_equals_all_products_sorted() -> None:
    random = torch.Generator().manual_seed(1)
    log_probs = torch.randn(4, 5, generator=random).log_softmax(-1).sort(dim=-1, descending=True).values
    tokens = torch.randperm(20, generator=random).view(4, 5).tolist()
    entry = marginal_tree(9, log_probs.tolist(), tokens, 30)
    paths = []
    for depth in range(1, 5):
        for ranks in itertools.product(range(5), repeat=depth):
            score = sum(float(log_probs[d, r]) for d, r in enumerate(ranks))
            paths.append((-score, tuple(tokens[d][r] for d, r in enumerate(ranks))))
    best = [path for _, path in sorted(paths)[:30]]
    ours: list[tuple[int, ...]] = []
    for token, parent in zip(entry.tokens, entry.parents, strict=True):
        ours.append((*(ours[parent] if parent >= 0 else ()), token))
    assert ours == best
    assert entry.start == 9
    small = marginal_tree(1, [[-0.1], [-0.2]], [[3], [4]], 10)
    assert (small.tokens, small.parents) == ((3, 4), (-1, 0))


def test_full_vocabulary_needs_no_map(target_dir: Path, target: Target, load: Load, tmp_path: Path) -> None:
    shape = PEagleShape(
        **{f: getattr(SHAPE, f) for f in PEagleShape.__dataclass_fields__ if f != "draft_vocab"},
        draft_vocab=VOCAB,
    )
    tensors = random_tensors(shape, list(range(VOCAB)), seed=6)
    save(tmp_path, shape, tensors, model_fingerprint(target_dir), TAP_LAYERS, max_positions=64)
    drafter = load(tmp_path)
    assert isinstance(drafter, PEagleDrafter)
    assert drafter._draft_ids is None
    tokens = text(10, seed=1)
    start(drafter, target, 1, tokens)
    logits = reference_logits(shape, tensors, target.taps(tokens)[:-1], tokens, 6)
    assert list(draft(drafter, 1, 6)) == logits.argmax(-1).tolist()


def test_damaged_checkpoints_are_refused_by_name(
    checkpoint: Path, tensors: dict[str, Tensor], target_dir: Path, tmp_path: Path
) -> None:
    config = DrafterConfig.read(checkpoint)
    broken = {k: v for k, v in tensors.items() if k != "mask_hidden"}
    broken["layers.1.mlp.up_proj.weight"] = broken["layers.1.mlp.up_proj.weight"][:, :-1]
    save_drafter(tmp_path, config, broken)
    with pytest.raises(
        CheckpointError, match=r"mask_hidden is missing.*layers\.1\.mlp\.up_proj\.weight has shape"
    ):
        load_drafter(tmp_path, target_dir)
    shape = {**config.shape, "mask_token": VOCAB}
    save_drafter(tmp_path, DrafterConfig("p_eagle", config.target_fingerprint, "tiny", shape), tensors)
    with pytest.raises(CheckpointError, match="mask_token"):
        load_drafter(tmp_path, target_dir)


def test_features_take_the_sheets_bytes(drafter: PEagleDrafter) -> None:
    """One fused feature of the drafter's width for every committed token, not three streams."""
    assert drafter.tap is not None
    assert drafter.tap.width(SHAPE.target_hidden) == SHAPE.hidden
    assert drafter.tap.num_sources == 3
