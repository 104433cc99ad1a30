"""Walking a tree by the target's choices: a hand table."""

from __future__ import annotations

import pytest
import torch

from paceline.draft_tree import DraftTree
from paceline.sampling.batch import verify_step
from paceline.sampling.choices import target_choices
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.row_params import RowParams
from paceline.sampling.verify import FinalKind, TreeWalk, Verdict, walk

CHAIN = DraftTree((4, 5, 6), (-1, 0, 1), (1, 2, 3), (0.9, 0.8, 0.7), (None,) * 3)
#        root -> 4 -> 6
#             -> 5 -> 6 -> 7
#                  -> 8
TREE = DraftTree((4, 5, 6, 6, 8, 7), (-1, -1, 0, 1, 1, 3), (1, 1, 2, 2, 2, 3), (0.5,) * 6, (None,) * 6)


@pytest.mark.parametrize(
    ("tree", "choices", "verdict"),
    [
        (DraftTree(), [3], Verdict((), (), 3, FinalKind.PLAIN)),
        (CHAIN, [4, 5, 6, 9], Verdict((1, 2, 3), (4, 5, 6), 9, FinalKind.BONUS)),
        (CHAIN, [4, 0, 6, 9], Verdict((1,), (4,), 0, FinalKind.RECOVERED)),
        (CHAIN, [0, 5, 6, 9], Verdict((), (), 0, FinalKind.RECOVERED)),
        (TREE, [5, 1, 7, 1, 1, 1, 9], Verdict((2,), (5,), 7, FinalKind.RECOVERED)),
        (TREE, [5, 0, 6, 0, 7, 0, 9], Verdict((2, 4, 6), (5, 6, 7), 9, FinalKind.BONUS)),
        (TREE, [5, 0, 8, 0, 0, 3, 0], Verdict((2, 5), (5, 8), 3, FinalKind.BONUS)),
        (TREE, [4, 6, 0, 2, 0, 0, 0], Verdict((1, 3), (4, 6), 2, FinalKind.BONUS)),
        (TREE, [4, 7, 0, 2, 0, 0, 0], Verdict((1,), (4,), 7, FinalKind.RECOVERED)),
    ],
)
def test_the_branch_the_target_chose_is_accepted(
    tree: DraftTree, choices: list[int], verdict: Verdict
) -> None:
    assert walk(tree, choices) == verdict


def test_rows_ahead_are_first_children() -> None:
    walker = TreeWalk(TREE)
    assert walker.rows_ahead(1) == [0]
    assert walker.rows_ahead(9) == [0, 1, 3]
    walker.take(5)
    assert walker.rows_ahead(2) == [2, 4]
    assert walker.rows_ahead(9) == [2, 4, 6]
    assert TreeWalk(DraftTree()).rows_ahead(3) == [0]


def test_verdict_says_what_to_keep_and_what_to_commit() -> None:
    verdict = walk(CHAIN, [4, 5, 0, 9])
    assert verdict.kept_rows == (0, 1, 2)
    assert verdict.committed_tokens == (4, 5, 0)


def test_choices_are_counted() -> None:
    with pytest.raises(ValueError, match="4 rows"):
        walk(CHAIN, [1, 2, 3])


def test_a_greedy_batch_is_one_argmax_over_untouched_logits() -> None:
    logits = torch.randn(4, 11)
    rows = RowParams.build([SamplingParams(temperature=0, top_k=3, seed=9)], [4])
    assert torch.equal(target_choices(logits, [0] * 4, rows), logits.argmax(-1))
    assert not {"seeds"} & set(vars(rows))  # no tensor was made


@pytest.mark.parametrize("mode", [VerifyMode.REJECTION, VerifyMode.BLOCK, VerifyMode.TYPICAL])
def test_modes_that_look_at_drafts_have_no_choice_of_their_own(mode: VerifyMode) -> None:
    rows = RowParams.build([SamplingParams(mode=mode)], [1])
    with pytest.raises(ValueError, match=mode.value):
        target_choices(torch.zeros(1, 3), [0], rows)


def test_a_step_checks_its_shapes() -> None:
    greedy = SamplingParams(temperature=0)
    with pytest.raises(ValueError, match="rows of logits"):
        verify_step(torch.zeros(3, 9), [CHAIN], [5], [greedy])
    with pytest.raises(ValueError, match="lengths"):
        verify_step(torch.zeros(4, 9), [CHAIN], [5, 6], [greedy])
    with pytest.raises(ValueError, match="chains"):
        verify_step(torch.zeros(7, 9), [TREE], [5], [SamplingParams(mode=VerifyMode.BLOCK)])
    assert verify_step(torch.zeros(0, 9), [], [], []) == []
