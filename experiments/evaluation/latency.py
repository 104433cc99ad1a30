"""How long a drafter takes for a block, by the block's length.

Responsible for: blocks of every length in turn on one growing text, each begun anew as after a rejection. Deliberately
does not know: acceptance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from experiments.evaluation.figures import spread
from experiments.evaluation.measure import Contestant, Stage
from experiments.evaluation.plan import Plan
from paceline.methods.drafter import DraftRequest
from paceline.target import SequenceRows

LENGTHS = range(1, 17)


def latency(
    plan: Plan,
    stage: Stage,
    contestant: Contestant,
    repeats: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Milliseconds of a block: one committed position taken in, and the draft behind it.

    The text is the drafter's prompt and tokens that its last block did not foretell, so that nothing is left of that
    block; the features are the target's for that text.

    Returns:
        For each length in `LENGTHS` and each way that the drafter knows (`drafts`), a spread in milliseconds, None for
        chains that it does not draft that long. A tree of a length has the plan's nodes, or as many as it is long where
        those are fewer.
    """
    drafter, engine = contestant.drafter, contestant.engine
    prompt = list(stage.prompts[0][1])
    rows = []
    for name, arm in {way.arm.name: way.arm for way in contestant.ways}.items():
        sampling = plan.sampling(plan.temperatures[0], 0)
        times: dict[int, list[float]] = {length: [] for length in LENGTHS}
        with torch.inference_mode():
            slot = engine.open(len(prompt) + len(LENGTHS) * (repeats + 1))
            drafter.open(1, prompt)
            try:
                text, last = list(prompt), prompt[-1]
                for repeat in range(repeats + 1):  # the first warms up
                    progress(f"{contestant.name}: blocks, {name}, {repeat} of {repeats}")
                    for length in LENGTHS:
                        fresh = text[engine.length(slot) :]
                        first = engine.length(slot)
                        output = engine.step([SequenceRows(slot, fresh, num_logits="last")])
                        token = int(output.logits[0][-1].argmax())
                        token = token if token != last else (token + 1) % engine.shape.vocab_size
                        nodes = max(plan.max_nodes, length) if arm.branches else 0
                        is_fed = drafter.tap is not None and arm.reads_features
                        features = output.features[0] if is_fed else None
                        started_s = time.perf_counter()
                        drafter.extend(1, len(text), [token])
                        if features is not None:
                            drafter.feed(1, first, features)
                        request = DraftRequest(1, length, nodes, sampling, reads_features=arm.reads_features)
                        (entry,) = drafter.draft([request])
                        elapsed_s = time.perf_counter() - started_s
                        text.append(token)
                        if entry is not None:
                            last = entry.tokens[0]
                            if repeat and (arm.branches or len(entry.tokens) == length):
                                times[length].append(1e3 * elapsed_s)
            finally:
                drafter.close(1)
                engine.close(slot)
        rows += [{"drafts": name, "length": length, "ms": spread(times[length])} for length in LENGTHS]
    return rows
