"""Verification of one step: all sequences, each in its own mode.

Responsible for: splitting a step's rows by mode, and computing no more choices than the walks need.

Deliberately does not know: models, the trie, KV slots, reports.

Called by: the verifier's step loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.draft_tree import DraftTree
from paceline.sampling import rows as kernel_rows
from paceline.sampling.block import verify_block
from paceline.sampling.choices import coupled_choices, greedy_choices
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.probabilities import ProbRows, measure_rows, target_probs
from paceline.sampling.row_params import RowParams
from paceline.sampling.tree_rejection import keyed_walk
from paceline.sampling.typical import verify_typical
from paceline.sampling.verify import TreeWalk, Verdict, walk


def verify_step(
    logits: Tensor,
    trees: Sequence[DraftTree],
    committed_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    maxima: Tensor | None = None,
    firsts: Sequence[int] | None = None,
) -> list[Verdict]:
    """Verify every sequence of a step.

    Args:
        logits: [rows, vocab] float32; for each sequence its root row, then its tree's nodes.
        trees: the draft nodes; empty trees mean plain decoding. In rejection mode they must come from
            `DraftTrie.select_drawn_tree`, in block mode from `DraftTrie.select_drawn_chain`.
        committed_lengths: committed length of each sequence before the step.
        params: sampling parameters of each sequence.
        maxima: [rows, ceil(vocab / 32)] float32, the largest of every 32 logits; None where unknown. They save
            a pass over the logits and change nothing else.
        firsts: the row of each sequence's root, in any order and with other rows in between; None where the
            sequences' rows are adjacent and complete.

    Returns:
        One verdict per sequence. In greedy and coupled mode the committed tokens do not depend on the trees; in
            rejection and block mode their distribution does not.
    """
    if not len(trees) == len(committed_lengths) == len(params):
        raise ValueError(
            f"{len(trees)} trees, {len(committed_lengths)} lengths, {len(params)} parameter sets"
        )
    if firsts is None:
        *firsts, num_rows = itertools.accumulate((len(tree) + 1 for tree in trees), initial=0)
        if logits.shape[0] != num_rows:
            raise ValueError(f"{num_rows} rows in the step but {logits.shape[0]} rows of logits")
    elif len(firsts) != len(trees) or any(
        not 0 <= first < logits.shape[0] - len(tree) for first, tree in zip(firsts, trees, strict=True)
    ):
        raise ValueError(f"the rows of {len(trees)} trees do not fit into {logits.shape[0]} rows of logits")
    modes = [param.resolved_mode for param in params]
    verdicts: dict[int, Verdict] = {}
    if VerifyMode.GREEDY in modes:
        choices = greedy_choices(logits, maxima)  # one reduction for the whole step
        for index, tree in enumerate(trees):
            if modes[index] is VerifyMode.GREEDY:
                verdicts[index] = walk(tree, choices[firsts[index] : firsts[index] + len(tree) + 1])
    coupled = [index for index, mode in enumerate(modes) if mode is VerifyMode.COUPLED]
    verdicts.update(_walk_coupled(logits, trees, committed_lengths, params, firsts, coupled, maxima))
    rejecting = [index for index, mode in enumerate(modes) if mode is VerifyMode.REJECTION]
    verdicts.update(_walk_rejection(logits, trees, committed_lengths, params, firsts, rejecting, maxima))
    for index, mode in enumerate(modes):
        if index not in verdicts:
            tree, first = trees[index], firsts[index]
            rows = slice(first, first + len(tree) + 1)
            verdicts[index] = _decide(mode, tree, logits[rows], committed_lengths[index], params[index])
    return [verdicts[index] for index in range(len(trees))]


def _decide(mode: VerifyMode, tree: DraftTree, logits: Tensor, start: int, params: SamplingParams) -> Verdict:
    """One sequence in a mode that reads all of its rows."""
    probs = target_probs(logits, RowParams.build([params], [len(tree) + 1], logits.device))
    if mode is VerifyMode.BLOCK:
        return verify_block(tree, probs, params.seed, start)
    if mode is VerifyMode.TYPICAL:
        epsilon, delta = params.typical_epsilon, params.typical_delta
        return verify_typical(tree, probs, epsilon, delta, params.seed, start)
    raise AssertionError(f"{mode} is decided before")


def _walk_rejection(
    logits: Tensor,
    trees: Sequence[DraftTree],
    committed_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    firsts: Sequence[int],
    members: Sequence[int],
    maxima: Tensor | None,
) -> dict[int, Verdict]:
    """Walk down the trees of all sequences in rejection mode together, level by level, as :func:`_walk_coupled`
    does.
    """
    probs: dict[int, ProbRows] = {}
    for index in members:
        rows = slice(firsts[index], firsts[index] + len(trees[index]) + 1)
        own = RowParams.build([params[index]], [len(trees[index]) + 1], logits.device)
        probs[index] = ProbRows(logits[rows], own, None if maxima is None else maxima[rows])
    walks = {
        index: keyed_walk(trees[index], probs[index], params[index].seed, committed_lengths[index])
        for index in members
    }
    num_threads = _num_threads(logits)
    verdicts: dict[int, Verdict] = {}
    while walks:
        num_ahead = max(1, num_threads // len(walks))
        measure_rows(
            [(probs[index], row) for index, walk_ in walks.items() for row in walk_.rows_ahead(num_ahead)]
        )
        for index, walk_ in list(walks.items()):
            verdict = walk_.step()
            if verdict is not None:
                verdicts[index] = verdict
                del walks[index]
    return verdicts


def _walk_coupled(
    logits: Tensor,
    trees: Sequence[DraftTree],
    committed_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    firsts: Sequence[int],
    members: Sequence[int],
    maxima: Tensor | None,
) -> dict[int, Verdict]:
    """Walk down the trees of all coupled sequences together, level by level.

    Choices are computed only for the rows that the walks have reached: rows off the chosen path are never
    needed. Cores that would be idle compute rows further down the first branches.
    """
    walks = {index: TreeWalk(trees[index]) for index in members}
    num_threads = _num_threads(logits)
    verdicts: dict[int, Verdict] = {}
    while walks:
        num_ahead = max(1, num_threads // len(walks))
        wanted = [
            (index, row, walk_.depth + further)
            for index, walk_ in walks.items()
            for further, row in enumerate(walk_.rows_ahead(num_ahead))
        ]
        rows = [firsts[index] + row for index, row, _ in wanted]
        positions = [committed_lengths[index] + depth for index, _, depth in wanted]
        own = [params[index] for index, _, _ in wanted]
        choices = coupled_choices(logits, rows, positions, own, maxima)
        for (index, row, _), choice in zip(wanted, choices, strict=True):
            if index not in walks or walks[index].row != row:
                continue  # the walk has ended or taken another branch
            verdict = walks[index].take(choice)
            if verdict is not None:
                verdicts[index] = verdict
                del walks[index]
    return verdicts


def _num_threads(logits: Tensor) -> int:
    """Rows that can be computed in parallel at no extra cost."""
    return torch.get_num_threads() if kernel_rows.can_run(logits) else 1
