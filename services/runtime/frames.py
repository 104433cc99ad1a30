"""Draft and commit batches: packed arrays on the wire, one object per entry in process.

Responsible for: packing, and unpacking with vectorised checks of every number. Drafts are hints: a malformed entry is
dropped and counted, and the rest of its batch is used. Commits are facts: a malformed batch is an error.

Deliberately does not know: which sequences exist, which epochs are current, what a trie does with an entry.
Called by: verifier, drafter and conductor at their stream edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.contract.errors import StreamProtocolError
from paceline.contract.limits import MAX_DRAFT_NODES, MAX_POSITIONS
from paceline.drafts import DraftEntry
from paceline.v1 import peer_pb2
from services.runtime.supports import SupportReader, pack_supports

MAX_ENTRIES = 4096
MAX_COMMIT_TOKENS = 2**20

_LOG_PROB_SLACK = 1e-3  # a half-precision log-softmax may round to slightly above zero


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens committed to one sequence; ``start`` is its committed length before them."""

    sequence_id: int
    epoch: int
    start: int
    tokens: tuple[int, ...]


def pack_drafts(items: Iterable[tuple[int, int, DraftEntry]]) -> peer_pb2.DraftBatch:
    """Pack ``(sequence_id, epoch, entry)`` triples.

    A batch has log-probs for all its tokens or for none, so one entry without them drops those of the others.
    """
    batch = peer_pb2.DraftBatch()
    log_probs: list[float] = []
    entries: list[DraftEntry] = []
    for sequence_id, epoch, entry in items:
        entries.append(entry)
        batch.sequence_ids.append(sequence_id)
        batch.epochs.append(epoch)
        batch.starts.append(entry.start)
        batch.sizes.append(len(entry.tokens))
        batch.tokens.extend(entry.tokens)
        batch.parents.extend(entry.parents)
        log_probs.extend(entry.log_probs)
    if len(log_probs) == len(batch.tokens):
        batch.log_probs.extend(log_probs)
    if any(entry.draft_dists is not None for entry in entries):
        pack_supports(batch, entries)
    return batch


def unpack_drafts(
    batch: peer_pb2.DraftBatch, vocab_size: int
) -> tuple[list[tuple[int, int, DraftEntry]], int]:
    """Unpack a batch from an untrusted peer; never raises.

    Checked per entry: sequence id above 0, start from 1 to MAX_POSITIONS, size from 1 to MAX_DRAFT_NODES, token
    ids below vocab_size, parents in topological order (``-1 <= parents[i] < i``), log-probs finite and not above 0, and
    the draft distributions (`SupportReader.drawn`).

    Returns:
        The valid entries as ``(sequence_id, epoch, entry)``, and the number of malformed draft nodes. An entry without
        tokens counts as one node. A batch whose arrays disagree is malformed as a whole, and so are the entries after
        the first MAX_ENTRIES.
    """
    num_entries, num_tokens = len(batch.sequence_ids), len(batch.tokens)
    sizes = np.fromiter(batch.sizes, dtype=np.int64, count=len(batch.sizes))
    arrays_agree = (
        len(batch.epochs) == len(batch.starts) == len(batch.sizes) == num_entries
        and len(batch.parents) == num_tokens
        and len(batch.log_probs) in (0, num_tokens)
        and int(sizes.sum()) == num_tokens
    )
    if not arrays_agree:
        return [], max(num_tokens, num_entries, 1)
    if num_entries == 0:
        return [], 0
    ends = np.cumsum(sizes)
    begins = ends - sizes
    starts = np.fromiter(batch.starts, dtype=np.int64, count=num_entries)
    tokens = np.fromiter(batch.tokens, dtype=np.int64, count=num_tokens)
    parents = np.fromiter(batch.parents, dtype=np.int64, count=num_tokens)
    log_probs = np.fromiter(batch.log_probs, dtype=np.float64, count=len(batch.log_probs))
    owner = np.repeat(np.arange(num_entries), sizes)  # [num_tokens] entry of each token
    index = np.arange(num_tokens) - begins[owner]  # [num_tokens] index of each token in its entry

    bad_token = (tokens >= vocab_size) | (parents < -1) | (parents >= index)
    if log_probs.size:
        bad_token |= ~np.isfinite(log_probs) | (log_probs > _LOG_PROB_SLACK)
        np.minimum(log_probs, 0.0, out=log_probs)
    bad_entry = np.bincount(owner, weights=bad_token, minlength=num_entries) > 0
    bad_entry |= (sizes < 1) | (sizes > MAX_DRAFT_NODES) | (starts < 1) | (starts > MAX_POSITIONS)
    bad_entry |= np.fromiter(
        (sequence_id == 0 for sequence_id in batch.sequence_ids), dtype=bool, count=num_entries
    )
    bad_entry[MAX_ENTRIES:] = True

    token_list, parent_list, log_prob_list = tokens.tolist(), parents.tolist(), log_probs.tolist()
    supports = SupportReader(batch, vocab_size) if batch.num_supports or batch.draws else None
    entries = []
    for i in np.flatnonzero(~bad_entry).tolist():
        span = slice(int(begins[i]), int(ends[i]))
        entry = DraftEntry(
            start=int(starts[i]),
            tokens=tuple(token_list[span]),
            parents=tuple(parent_list[span]),
            log_probs=tuple(log_prob_list[span]),
        )
        if supports is not None:
            drawn = supports.drawn(i, entry)
            if drawn is None:
                bad_entry[i] = True
                continue
            entry = drawn
        entries.append((batch.sequence_ids[i], batch.epochs[i], entry))
    return entries, int(np.maximum(sizes, 1)[bad_entry].sum())


def unpack_commits(batch: peer_pb2.CommitBatch, vocab_size: int) -> list[Commit]:
    """Unpack commits, in order.

    Raises:
        StreamProtocolError: arrays disagree, or a number is out of range. No commit of such a batch is used,
            since a sequence with a skipped commit would have a wrong text from then on.
    """
    num_entries, num_tokens = len(batch.sequence_ids), len(batch.tokens)
    if num_entries > MAX_ENTRIES or num_tokens > MAX_COMMIT_TOKENS:
        raise StreamProtocolError(
            f"{num_entries} commits of {num_tokens} tokens, limits {MAX_ENTRIES}, {MAX_COMMIT_TOKENS}"
        )
    if not len(batch.epochs) == len(batch.starts) == len(batch.sizes) == num_entries:
        raise StreamProtocolError("commit arrays differ in length")
    sizes: npt.NDArray[np.int64] = np.fromiter(batch.sizes, dtype=np.int64, count=num_entries)
    starts = np.fromiter(batch.starts, dtype=np.int64, count=num_entries)
    tokens = np.fromiter(batch.tokens, dtype=np.int64, count=num_tokens)
    if int(sizes.sum()) != num_tokens:
        raise StreamProtocolError(f"commit sizes add up to {int(sizes.sum())}, there are {num_tokens} tokens")
    if bool((sizes < 1).any()) or bool((starts < 1).any()) or bool((starts + sizes > MAX_POSITIONS).any()):
        raise StreamProtocolError("a commit is empty or out of the positions")
    if bool((tokens >= vocab_size).any()):
        raise StreamProtocolError(f"a committed token is not below the vocabulary size {vocab_size}")
    if 0 in batch.sequence_ids:
        raise StreamProtocolError("a commit names sequence 0")
    return [
        Commit(batch.sequence_ids[i], batch.epochs[i], int(starts[i]), span)
        for i, span in enumerate(_spans(tokens.tolist(), sizes.tolist()))
    ]


def _spans(tokens: Sequence[int], sizes: Sequence[int]) -> Iterable[tuple[int, ...]]:
    begin = 0
    for size in sizes:
        yield tuple(tokens[begin : begin + size])
        begin += size
