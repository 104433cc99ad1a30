"""A round of a one-pass drafter: the rows of one pass behind a committed text, and the drafts made from them.

A row's *depth* is the number of tokens between the text and the token that the row proposes. A row's proposal does not
depend on the tokens drafted before it. So a tree is the product of the depths' distributions (`marginal_tree.py`), and
tokens may be drawn depth by depth, each from the distribution that is sent with it. DSpark's rows do depend on the
token before: it makes their logits depth by depth, and takes only the choice of tokens from here.

Contains no model and no cache. Called by the drafters of P-EAGLE, PARD, DFlash and DSpark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.draft_layer import MAX_BEST, LayerOutput, join_rows
from paceline.drafts import DraftEntry, DrawRule, SiblingDraws
from paceline.methods.choice import choose_chain_tokens, draw_chain_tokens, rank_children
from paceline.methods.drafter import DraftRequest
from paceline.methods.one_pass.marginal_tree import marginal_tree
from paceline.methods.sibling_chain import num_draws, sibling_chain_entry
from paceline.sampling.params import VerifyMode

Ranked = tuple[list[list[float]], list[list[int]]]
"""The likeliest tokens of each row of a pass, best first: log-probabilities, and draft ids."""


@dataclass(slots=True)
class OnePassRound:
    """Rows behind a sequence's committed tokens, and the chain made from them.

    Attributes:
        depths: for each depth that was run, the pass and the row of that pass.
        tokens: of the chain drafted so far.
        log_probs: of each token.
        draws: of each token, if tokens are drawn; `log_probs` is empty then.
    """

    depths: list[tuple[LayerOutput, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    draws: list[SiblingDraws] = field(default_factory=list)

    def logits(self, first: int, end: int) -> Tensor:
        """Draft logits of depths `first` to `end - 1`, `[end - first, draft_vocab]` float32."""
        return join_rows([output.logits[row : row + 1] for output, row in self.depths[first:end]])

    def entry(self, start: int, num_tokens: int) -> DraftEntry:
        """The first tokens of the chain as a draft entry, with siblings if tokens were drawn."""
        if self.draws:
            return sibling_chain_entry(start, self.draws[:num_tokens])
        return DraftEntry.chain(start, tuple(self.tokens[:num_tokens]), tuple(self.log_probs[:num_tokens]))


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """A request, and the round that serves it.

    Attributes:
        request: the request.
        round: round of its sequence; its rows reach `depth`.
        start: committed length.
        depth: length of the longest path.
    """

    request: DraftRequest
    round: OnePassRound
    start: int
    depth: int


def round_entries(
    wanted: Sequence[RoundRequest], draft_ids: Tensor | None, target_id_of: Sequence[int]
) -> dict[int, DraftEntry]:
    """Drafts by sequence: trees for requests that may rank and want more nodes than tokens in a row, chains for others.

    Args:
        wanted: requests with their rounds.
        draft_ids: `[draft_vocab]` int64 target id of each draft id; None where they are the same.
        target_id_of: the same as a sequence.
    """
    trees = [w for w in wanted if w.request.may_rank and w.request.max_nodes > w.depth]
    chains = [w for w in wanted if not (w.request.may_rank and w.request.max_nodes > w.depth)]
    _lengthen(chains, draft_ids)
    entries = {w.request.sequence_id: w.round.entry(w.start, w.depth) for w in chains}
    best: dict[int, Ranked] = {}
    for w in trees:
        entries[w.request.sequence_id] = _tree(w, draft_ids, target_id_of, best)
    return entries


def _lengthen(wanted: Sequence[RoundRequest], draft_ids: Tensor | None) -> None:
    """Choose the tokens that chains still lack, all depths of all sequences at once."""
    growing = [w for w in wanted if len(w.round.tokens) < w.depth]
    if not growing:
        return
    choose_rows(
        [(w, depth) for w in growing for depth in range(len(w.round.tokens), w.depth)],
        join_rows([w.round.logits(len(w.round.tokens), w.depth) for w in growing]),
        draft_ids,
    )


def choose_rows(rows: Sequence[tuple[RoundRequest, int]], logits: Tensor, draft_ids: Tensor | None) -> None:
    """Add a token to a chain for each row, those of a chain in order.

    Args:
        rows: a request, and the depth of its chain's next token.
        logits: `[rows, draft_vocab]` float32.
        draft_ids: as in :func:`round_entries`.
    """
    drawn = [i for i, (w, _) in enumerate(rows) if w.request.draw_rule is not DrawRule.TOP]
    ranked = [i for i in range(len(rows)) if i not in set(drawn)]
    if ranked:
        chosen, log_probs = choose_chain_tokens(
            logits[ranked] if drawn else logits,
            draft_ids,
            [rows[i][0].start + rows[i][1] for i in ranked],
            [rows[i][0].request.sampling for i in ranked],
        )
        for i, token, log_prob in zip(ranked, chosen.tolist(), log_probs.tolist(), strict=True):
            rows[i][0].round.tokens.append(token)
            rows[i][0].round.log_probs.append(log_prob)
    if drawn:
        draws = draw_chain_tokens(
            logits[drawn],
            draft_ids,
            starts=[rows[i][0].start for i in drawn],
            positions=[rows[i][0].start + rows[i][1] for i in drawn],
            params=[rows[i][0].request.sampling for i in drawn],
            rules=[rows[i][0].request.draw_rule for i in drawn],
            support_sizes=[rows[i][0].request.support_size for i in drawn],
            counts=[num_draws(rows[i][1], rows[i][0].depth, rows[i][0].request.max_nodes) for i in drawn],
        )
        for i, siblings in zip(drawn, draws, strict=True):
            rows[i][0].round.tokens.append(siblings.tokens[0])
            rows[i][0].round.draws.append(siblings)


def _tree(
    wanted: RoundRequest, draft_ids: Tensor | None, target_id_of: Sequence[int], best: dict[int, Ranked]
) -> DraftEntry:
    """The likeliest tree over the depths' distributions; `best` caches the ranking of each pass."""
    request, start, depth = wanted.request, wanted.start, wanted.depth
    branch = min(MAX_BEST, request.max_nodes, len(target_id_of))
    log_probs: list[list[float]] = []
    ids: list[list[int]] = []
    if request.sampling.resolved_mode is VerifyMode.COUPLED:
        positions = range(start, start + depth)
        log_probs, ids = rank_children(
            wanted.round.logits(0, depth), draft_ids, positions, [request.sampling] * depth, branch
        )
    else:
        for output, row in wanted.round.depths[:depth]:
            if id(output) not in best:
                best[id(output)] = output.best(min(MAX_BEST, len(target_id_of)))
            ranked_log_probs, ranked_ids = best[id(output)]
            log_probs.append(ranked_log_probs[row][:branch])
            ids.append(ranked_ids[row][:branch])
    tokens = [[target_id_of[i] for i in row] for row in ids]
    return marginal_tree(start, log_probs, tokens, request.max_nodes)
