"""Timed steps at start-up, so that the first policy knows what rows and context cost.

Responsible for: a limited series of decoding steps over several row counts, sequences and contexts, verified like real
steps.

Deliberately does not know: who uses the times.

Called by: the host, before the process serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.draft_tree import DraftTree
from paceline.sampling.batch import verify_step
from paceline.sampling.params import SamplingParams
from paceline.target import KVCacheFullError, SequenceRows, TargetEngine
from paceline.v1 import target_pb2

_SHAPES = ((1, 1), (1, 5), (1, 9), (1, 13), (2, 1), (2, 5), (4, 5), (1, 2), (1, 3))
"""(sequences, rows of each), the most telling first."""
_CONTEXTS = (32, 256)
_MAX_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step of the profile.

    Attributes:
        num_context_tokens: positions attended to, summed over sequences.
        step_us: forward pass and verification.
    """

    num_rows: int
    num_sequences: int
    num_context_tokens: int
    step_us: int


def profile_steps(
    engine: TargetEngine, limit_s: float, clock: Callable[[], float] = time.perf_counter
) -> list[TimedStep]:
    """Run and time steps until the time limit, or for five rounds over all shapes; the engine is left as it was.

    The first step after a prompt is not counted, because it warms up memory. A KV cache that is too small for the
    profile ends it early.

    Args:
        engine: has no open slot.
        limit_s: seconds; 0 runs nothing. The current step may exceed the limit.
        clock: seconds.
    """
    timed: list[TimedStep] = []
    if limit_s <= 0:
        return timed
    ends_at = clock() + limit_s
    longest = engine.shape.max_positions - max(rows for _, rows in _SHAPES)
    contexts = sorted({min(context, longest) for context in _CONTEXTS if longest > 0})
    slots: list[int] = []
    try:
        with torch.inference_mode():
            for context in contexts:
                if clock() >= ends_at:
                    break
                for slot in slots:
                    engine.close(slot)
                slots.clear()
                context_s = max(ends_at - clock(), 0.0) / (len(contexts) - contexts.index(context))
                timed += _profile_context(engine, context, clock() + context_s, slots, clock)
    except KVCacheFullError:
        pass
    finally:
        for slot in slots:
            engine.close(slot)
    return timed


def _profile_context(
    engine: TargetEngine, context: int, ends_at: float, slots: list[int], clock: Callable[[], float]
) -> list[TimedStep]:
    """Steps of all shapes after texts of one length; the text is run once and copied."""
    capacity_tokens = context + max(rows for _, rows in _SHAPES)
    slots.append(engine.open(capacity_tokens))
    engine.step([SequenceRows(slots[0], [0] * context, num_logits=range(0))])
    engine.keep(slots[0], range(context))
    _step(engine, slots[:1], 1, context, clock)
    timed: list[TimedStep] = []
    for _ in range(_MAX_ROUNDS):
        for sequences, rows in _SHAPES:
            if clock() >= ends_at:
                return timed
            while len(slots) < sequences:
                slots.append(engine.fork(slots[0], context, capacity_tokens))
            took_us = _step(engine, slots[:sequences], rows, context, clock)
            timed.append(TimedStep(sequences * rows, sequences, sequences * context, max(took_us, 1)))
    return timed


def _step(engine: TargetEngine, slots: list[int], rows: int, context: int, clock: Callable[[], float]) -> int:
    """Microseconds of one decoding step with a chain of draft nodes after each root; no row is kept."""
    num_nodes = rows - 1
    tree = DraftTree(
        (0,) * num_nodes,
        tuple(range(-1, num_nodes - 1)),
        tuple(range(1, rows)),
        (1.0,) * num_nodes,
        (None,) * num_nodes,
    )
    started_s = clock()
    output = engine.step(
        [
            SequenceRows(slot, [0] * rows, num_logits=range(rows), wants_features=bool(engine.taps))
            for slot in slots
        ]
    )
    verify_step(
        torch.cat(output.logits),
        [tree] * len(slots),
        [context + 1] * len(slots),
        [SamplingParams(temperature=0.0)] * len(slots),
    )
    took_s = clock() - started_s
    for slot in slots:
        engine.keep(slot, ())
    return round(took_s * 1e6)


def profile_message(timed: list[TimedStep]) -> target_pb2.StepProfile:
    """The wire form."""
    return target_pb2.StepProfile(
        num_rows=[step.num_rows for step in timed],
        num_sequences=[step.num_sequences for step in timed],
        num_context_tokens=[step.num_context_tokens for step in timed],
        step_us=[step.step_us for step in timed],
    )
