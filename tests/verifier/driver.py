"""One conductor's session at a stepped verifier: it opens sequences and keeps what is committed on them."""

from __future__ import annotations

from typing import Any

import torch

from paceline.sampling.params import SamplingParams
from paceline.sampling.rules import LogitRule
from paceline.target import TargetEngine
from paceline.v1 import target_pb2
from services.runtime import tensors
from services.verifier.inbox import Open
from services.verifier.specs import SequenceSpec
from tests.simulation.verifier import ListedSession, ListedSubscriber, SteppedVerifier
from tests.verifier.conductor import VOCAB_SIZE

PROMPT = [11 * place % VOCAB_SIZE for place in range(20)]


class Driver:
    """One session of a stepped verifier, and what was committed on it, by the opening's key."""

    def __init__(self, engine: TargetEngine, **options: Any) -> None:
        self.verifier = SteppedVerifier(engine, **options)
        self.session = ListedSession()
        self.ids: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.failures: list[Any] = []
        self.steps: list[target_pb2.StepReport] = []
        self.ended: list[int] = []

    def open(
        self, key: int, prompt: list[int], num_tokens: int, rule: LogitRule | None = None, **fields: Any
    ) -> None:
        fields = {"stop_token_ids": frozenset(), "max_draft_nodes": 8, **fields}
        spec = SequenceSpec(key, 0, tuple(prompt), SamplingParams(temperature=0.0), num_tokens, **fields)
        self.tokens[key] = []
        self.verifier.put(Open(self.session, spec, rule))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.verifier.step()
            self._read()

    def run(self, *keys: int) -> list[list[int]]:
        for _ in range(2000):
            if set(keys) <= set(self.ended):
                break
            self.step()
        return [self.tokens[key] for key in keys]

    def num_rows(self) -> int:
        rows = sum(stats.num_rows for stats in self.verifier.stats)
        self.verifier.stats.clear()
        return rows

    def _read(self) -> None:
        for frame in self.session.take():
            for opened in frame.opened:
                self.ids[opened.sequence_id] = opened.key
            self.failures.extend(frame.failures)
            self.ended += [failure.key or self.ids[failure.sequence_id] for failure in frame.failures]
            if not frame.HasField("step"):
                continue
            self.steps.append(frame.step)
            begin = 0
            for which, sequence_id in enumerate(frame.step.commits.sequence_ids):
                end = begin + frame.step.commits.sizes[which]
                self.tokens[self.ids[sequence_id]] += frame.step.commits.tokens[begin:end]
                begin = end
                if frame.step.finish_reasons[which]:
                    self.ended.append(self.ids[sequence_id])

    def sequence_id(self, key: int) -> int:
        return next(sequence_id for sequence_id, own in self.ids.items() if own == key)


def features_of(driver: Driver, subscriber: ListedSubscriber, key: int) -> torch.Tensor:
    """The features that a drafter was sent of a sequence: each position once, in order."""
    parts, length = [], 0
    for chunk in subscriber.chunks:
        if chunk.sequence_id == driver.sequence_id(key):
            assert chunk.start == length
            parts.append(tensors.decode(chunk.features, 1 << 20))
            length += len(parts[-1])
    return torch.cat(parts)
