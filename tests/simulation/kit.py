"""What worlds share: targets, drafters, prompts and their plain texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from paceline.methods.drafter import Drafter
from paceline.methods.loading import load_drafter
from paceline.sampling.params import SamplingParams
from paceline.target import TargetEngine
from tests.simulation.texts import PlainTexts

VOCAB = 97
MAX_NEW_TOKENS = 40
MAX_ENTRY_TOKENS = 24
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=11),
    SamplingParams(temperature=1.3, seed=12, top_k=20),
    SamplingParams(temperature=1.0, seed=13, top_p=0.9),
    # Three tokens alone, so that the text often repeats itself, but not always.
    SamplingParams(temperature=0.0, logit_bias=((5, 90.0), (6, 90.0), (9, 90.0))),
)
Placement = Literal[
    "separate-eagle3",
    "separate-independent",
    "separate-medusa1",
    "colocated-eagle3",
    "colocated-independent",
    "colocated-medusa1",
    "none",
]


def _prompts(texts: PlainTexts) -> list[tuple[int, ...]]:
    """Prompts of 1 to 60 tokens; many begin alike, and some continue another prompt's answer."""
    random = torch.Generator().manual_seed(3)
    base = torch.randint(3, VOCAB, (60,), generator=random).tolist()
    own = [torch.randint(3, VOCAB, (length,), generator=random).tolist() for length in (1, 2, 9, 23)]
    heads = [base[:cut] for cut in (8, 17, 33, 47, 60)]
    branches = [[*base[:cut], 5, 6, 7] for cut in (17, 33)]
    answered = [[*base[:17], *texts.of(base[:17], sampling).tokens[:12], 9] for sampling in SAMPLINGS[:2]]
    return [tuple(prompt) for prompt in (*own, *heads, *branches, *answered)]


@dataclass
class Kit:
    """Everything that worlds share; loading it takes a second."""

    engines: list[TargetEngine]
    texts: PlainTexts
    prompts: list[tuple[int, ...]]
    drafters: dict[str, Drafter]

    @classmethod
    def load(cls, target_dir: Path, drafter_dirs: Mapping[str, Path]) -> Kit:
        """Load everything in float32; the first drafter reads features, the others read the same or none."""
        drafters = {
            f"{placement}-{name}": load_drafter(path, target_dir, dtype=torch.float32)
            for name, path in drafter_dirs.items()
            for placement in ("separate", "colocated")
        }
        tap = next(iter(drafters.values())).tap
        assert tap is not None
        engines = [TargetEngine.load(target_dir, dtype=torch.float32, taps=[tap]) for _ in range(2)]
        texts = PlainTexts(TargetEngine.load(target_dir, dtype=torch.float32), MAX_NEW_TOKENS)
        return cls(engines, texts, _prompts(texts), drafters)
