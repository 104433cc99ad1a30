"""What drafters know of a sequence's next tokens once one pass has guessed all of them, and the drafts made of it.

Responsible for the rows behind a text's committed tokens (one for each *depth*, the number of tokens between the text
and what the row proposes), and for chains, draws and trees of them. What a row proposes does not depend on the tokens
drafted before it, so that a tree is the product of the depths' guesses (`marginal_tree.py`) and tokens may be drawn
depth by depth, each from the distribution that is sent along. Where a method's rows do depend on the token before
(`dspark.py`), it makes their logits itself, a depth at a time, and has their tokens chosen here.

Deliberately does not know: models, caches, how a row came about. Called by `p_eagle.py`, `pard1.py`, `dflash.py` and
`dspark.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.draft_layer import MAX_BEST, LayerOutput, join_rows
from paceline.methods.choice import choose_chain_tokens, draw_chain_tokens, rank_children
from paceline.methods.drafter import DraftRequest
from paceline.methods.one_pass.marginal_tree import marginal_tree
from paceline.methods.sibling_chain import num_draws, sibling_chain_entry
from paceline.sampling import VerifyMode
from paceline.trie import DraftEntry, DrawRule, SiblingDraws

Ranked = tuple[list[list[float]], list[list[int]]]
"""Of each row of a pass its likeliest tokens, best first: log-probabilities, and draft ids."""


@dataclass(slots=True)
class OnePassRound:
    """What is known of a sequence's next tokens, from the rows behind its committed ones.

    Attributes:
        depths: for each depth that was run, the pass and its row there.
        tokens: of the chain drafted so far.
        log_probs: of each token.
        draws: of each token, where tokens are drawn; log_probs then stays empty.
    """

    depths: list[tuple[LayerOutput, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    draws: list[SiblingDraws] = field(default_factory=list)

    def logits(self, first: int, end: int) -> Tensor:
        """Draft logits of depths `first` to `end - 1`, `[end - first, draft_vocab]` float32."""
        return join_rows([output.logits[row : row + 1] for output, row in self.depths[first:end]])

    def entry(self, start: int, num_tokens: int) -> DraftEntry:
        """The chain, or as much of it as is wanted, as a draft entry; where tokens were drawn, with their siblings."""
        if self.draws:
            return sibling_chain_entry(start, self.draws[:num_tokens])
        return DraftEntry.chain(start, tuple(self.tokens[:num_tokens]), tuple(self.log_probs[:num_tokens]))


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """A wish, and the round that it is made from.

    Attributes:
        request: the wish.
        round: of its sequence; its rows reach `depth`.
        start: committed length.
        depth: tokens in a row.
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
        wanted: what is wanted of which round.
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
    """Choose the tokens that chains still lack; all depths of all sequences at once."""
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
        rows: a wish, and the depth of its chain's next token.
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
    """The likeliest tree that the depths' guesses allow; `best` keeps what was ranked of each pass."""
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
