"""`python -m experiments.dials.drafter_process`: the drafter service around a dialled drafter.

Takes all flags of the drafter service; ``--drafter`` names the script's file. Everything between the wire and the
drafter is the service's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from experiments.dials.dials import Confidence, DialFile, Dials, fixed
from experiments.dials.drafter import DialledDrafter
from experiments.dials.script import Script
from paceline.models import resolve
from services.drafter.host import DrafterHost
from services.drafter.info import peer_info
from services.drafter.settings import DrafterSettings
from services.runtime.cores import plan_pinning
from services.runtime.lifecycle import serve
from services.runtime.process import Process
from services.runtime.settings import load

_DEFAULT = Dials()


class DialledSettings(DrafterSettings):
    """Paceline drafter with dials, for experiments alone."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_DIALLED_DRAFTER_")

    drafter: Path = Field(description="script of the target's texts, a JSON file")
    dials: Path | None = Field(
        None,
        description="JSON file of dials in place of the flags, read again for each sequence that is opened",
    )
    acceptance: float = Field(_DEFAULT.acceptance, ge=0, le=1, description="chance that a token is right")
    spread: float = Field(_DEFAULT.spread, ge=0, le=1, description="how far that differs between positions")
    draft_ms: float = Field(_DEFAULT.draft_ms, ge=0, le=10_000, description="time of one token in a row")
    draft_base_ms: float = Field(_DEFAULT.draft_base_ms, ge=0, le=10_000, description="time of one call")
    is_parallel: bool = Field(_DEFAULT.is_parallel, description="any number of tokens takes one token's time")
    lane_cost: float = Field(_DEFAULT.lane_cost, ge=0, le=1, description="share of it for each further row")
    bonus_hit_rate: float = Field(
        _DEFAULT.bonus_hit_rate, ge=0, le=1, description="chance that a correction is among the alternatives"
    )
    num_alternatives: int = Field(
        _DEFAULT.num_alternatives, ge=1, le=64, description="alternatives per place"
    )
    confidence: Confidence = Field(_DEFAULT.confidence, description=f"one of {', '.join(Confidence)}")
    seed: int = Field(_DEFAULT.seed, ge=0, lt=1 << 32, description="of the drafter's luck")

    def fixed_dials(self) -> Dials:
        """The dials that the flags set."""
        return Dials.from_dict({name: getattr(self, name) for name in _DEFAULT.as_dict()})


def main() -> None:
    """Serve until told to end."""
    settings = load(DialledSettings, sys.argv[1:])
    pinning = plan_pinning(settings.cores, settings.threads)

    async def build(process: Process) -> None:
        dials = fixed(settings.fixed_dials()) if settings.dials is None else DialFile(settings.dials)
        drafter = DialledDrafter(Script.read(settings.drafter), dials)
        info = peer_info(
            drafter,
            resolve(settings.model),
            device="cpu",
            dtype=torch.float32,
            tap=None,
            max_positions=None,
            name=settings.name,
        )
        await DrafterHost(settings, drafter, info).attach(process, pinning.pin_thread)

    serve("drafter", settings, build)


if __name__ == "__main__":
    main()
