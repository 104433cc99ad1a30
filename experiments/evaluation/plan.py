"""What an evaluation measures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from experiments.decoding.arm import Arm
from paceline.sampling.params import SamplingParams, VerifyMode

CHAIN, TREE = "chain", "tree"


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of an evaluation with one target.

    Attributes:
        model_dir: the target.
        temperatures: 0 is greedy.
        mode: verification above temperature 0.
        prompts_per_kind: held-out prompts of each kind.
        rounds: how often every prompt is decoded in every way.
        draft_length: tokens in a row.
        max_nodes: nodes of a tree.
        seed: of the first prompt in the first round; the next one's is one more.
    """

    model_dir: Path
    temperatures: tuple[float, ...] = (0.0, 0.8)
    mode: VerifyMode = VerifyMode.COUPLED
    prompts_per_kind: int = 8
    rounds: int = 1
    max_tokens: int = 128
    draft_length: int = 5
    max_nodes: int = 10
    seed: int = 1
    dtype: str = "bfloat16"
    device: str = "cpu"

    def mode_at(self, temperature: float) -> VerifyMode:
        """How drafts are verified at a temperature."""
        return VerifyMode.GREEDY if temperature == 0 else self.mode

    def arms(self, temperature: float, *, may_go_without: bool = False) -> list[Arm]:
        """A chain and a tree; for drafters that can do without features both again, without."""
        mode = self.mode_at(temperature)
        arms = [Arm(CHAIN, mode), Arm(TREE, mode, branches=True)]
        if may_go_without:
            arms += [replace(arm, name=f"{arm.name}, no features", reads_features=False) for arm in arms]
        return arms

    def sampling(self, temperature: float, index: int) -> SamplingParams:
        """Of the `index`-th generation of each way."""
        return SamplingParams(temperature=temperature, seed=self.seed + index, mode=self.mode_at(temperature))
