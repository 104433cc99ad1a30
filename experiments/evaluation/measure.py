"""Decoding with a drafter, and without, in turn.

Responsible for: engines that share one model, each with the features of its drafter and no others; the order of
generations, so that all ways meet the same machine; and whether drafts left the text alone. Deliberately does not know:
other drafters, and what is made of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.bench.prompts import Prompt, token_ids
from experiments.decoding.arm import Arm
from experiments.decoding.generation import Pass, generate
from experiments.evaluation.plan import Plan
from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.drafter import Drafter
from paceline.methods.loading import drafter_tap, load_drafter
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.target import TargetEngine

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation: what kind of prompt it followed, its passes and its tokens."""

    kind: str
    passes: tuple[Pass, ...]
    tokens: tuple[int, ...]

    @property
    def decode_s(self) -> float:
        """Seconds from the prompt's own pass to the end."""
        return sum(one.verify_s for one in self.passes[1:]) + sum(one.draft_s for one in self.passes)

    @property
    def num_decoded(self) -> int:
        """Tokens that the passes behind the prompt's committed."""
        return sum(len(one.tokens) for one in self.passes[1:])


@dataclass(slots=True)
class Way:
    """A drafter's generations at one temperature, as chains or as trees, and the plain ones beside them."""

    temperature: float
    arm: Arm
    generations: list[Generation] = field(default_factory=list)
    plain: list[Generation] = field(default_factory=list)

    @property
    def is_comparable(self) -> bool:
        """Whether the text may not depend on drafts; in other modes only its law does not."""
        return self.arm.mode in (VerifyMode.GREEDY, VerifyMode.COUPLED)

    @property
    def num_identical(self) -> int:
        """Generations whose text is the plain one's."""
        return sum(a.tokens == b.tokens for a, b in zip(self.generations, self.plain, strict=True))


@dataclass(slots=True)
class Contestant:
    """A drafter under a name, with an engine that reads its features."""

    name: str
    directory: Path
    config: DrafterConfig
    drafter: Drafter
    engine: TargetEngine
    ways: list[Way] = field(default_factory=list)

    @property
    def may_go_without(self) -> bool:
        """Whether it drafts without the target's features as well."""
        return self.drafter.tap is not None and self.drafter.tap.is_optional


@dataclass(frozen=True, slots=True)
class Stage:
    """The target and what was read beside it.

    Attributes:
        engine: without features.
        prompts: token ids and kind of each prompt.
        stop_token_ids: end a text.
    """

    engine: TargetEngine
    prompts: tuple[tuple[str, tuple[int, ...]], ...]
    stop_token_ids: frozenset[int]

    @classmethod
    def load(cls, plan: Plan, prompts: Sequence[Prompt]) -> Stage:
        """Load the target and put the prompts into its chat template."""
        from transformers import AutoTokenizer

        engine = TargetEngine.load(plan.model_dir, plan.device, getattr(torch, plan.dtype))
        tokenizer: Any = AutoTokenizer.from_pretrained(plan.model_dir, local_files_only=True)
        stops = frozenset() if tokenizer.eos_token_id is None else frozenset({int(tokenizer.eos_token_id)})
        return cls(
            engine,
            tuple((prompt.kind, tuple(token_ids(tokenizer, prompt.text))) for prompt in prompts),
            stops,
        )

    def enter(self, plan: Plan, directory: Path, name: str) -> Contestant:
        """Load a drafter, and give it an engine of its own over the same weights.

        Raises:
            CheckpointError: it cannot be used, or was made for another target.
        """
        config, tap = DrafterConfig.read(directory), drafter_tap(directory)
        drafter = load_drafter(directory, plan.model_dir, device=plan.device, dtype=self.engine.dtype)
        taps = [] if tap is None else [tap]
        engine = TargetEngine(self.engine.executor, self.engine.device, self.engine.weight_dtype, taps=taps)
        return Contestant(name, directory, config, drafter, engine)


def measure(
    plan: Plan, stage: Stage, contestant: Contestant, progress: Callable[[str], None] = lambda text: None
) -> None:
    """Decode every prompt in each of the drafter's ways, plain decoding among them; the order turns with each prompt.

    What came of it goes into `contestant.ways`. Nothing of it depends on which drafters are measured besides.
    """
    for temperature in plan.temperatures:
        for arm in plan.arms(temperature, may_go_without=contestant.may_go_without):
            progress(f"{contestant.name}: warm-up")
            first = _generate(plan, stage, contestant, arm, plan.sampling(temperature, 0), 0, WARM_UP_TOKENS)
            if not arm.branches or any(_branches(one) for one in first.passes):
                contestant.ways.append(Way(temperature, arm))
    num_prompts = len(stage.prompts)
    for index in range(plan.rounds * num_prompts):
        for temperature in plan.temperatures:
            sampling = plan.sampling(temperature, index)
            ways = [way for way in contestant.ways if way.temperature == temperature]
            plain = Way(temperature, plan.arms(temperature)[0])
            turns: list[tuple[Contestant | None, Way]] = [(None, plain), *((contestant, way) for way in ways)]
            shift = index % len(turns)
            for drafts, way in [*turns[shift:], *turns[:shift]]:
                progress(
                    f"{contestant.name}, T = {temperature:g}, generation {index + 1} of "
                    f"{plan.rounds * num_prompts}: {'plain' if drafts is None else way.arm.name}"
                )
                way.generations.append(
                    _generate(plan, stage, drafts, way.arm, sampling, index % num_prompts, plan.max_tokens)
                )
            for way in ways:
                way.plain += plain.generations


def _generate(
    plan: Plan,
    stage: Stage,
    contestant: Contestant | None,
    arm: Arm,
    sampling: SamplingParams,
    which: int,
    max_tokens: int,
) -> Generation:
    kind, prompt = stage.prompts[which]
    passes: list[Pass] = []
    tokens = generate(
        stage.engine if contestant is None else contestant.engine,
        None if contestant is None else contestant.drafter,
        prompt,
        arm,
        sampling,
        draft_length=plan.draft_length,
        max_nodes=plan.max_nodes if arm.branches else plan.draft_length,
        max_tokens=max_tokens,
        stop_token_ids=stage.stop_token_ids,
        watch=passes.append,
    )
    return Generation(kind, tuple(passes), tuple(tokens))


def _branches(one: Pass) -> bool:
    """Whether a draft has two tokens at one place."""
    return one.draft is not None and len(set(one.draft.parents)) < len(one.draft.parents)
