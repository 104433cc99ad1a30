"""The flags by which commands describe a deployment on this machine.

Responsible for: their names, help and values. Deliberately does not know: how a deployment is started. Used by
``paceline up`` and ``paceline generate``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.launch import choose_placement, find_drafter, find_model
from paceline.contract.limits import MAX_DRAFT_LENGTH
from paceline.embedded import DeploymentOptions, Placement, Ports
from paceline.embedded.cores import parse_cores

_PANEL = "On this machine"

Model = Annotated[
    str, typer.Option(help="Name of a fetched model, or its directory.", rich_help_panel=_PANEL)
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Directory of a drafter; by default the one that ships for the model.", rich_help_panel=_PANEL
    ),
]
PlacementFlag = Annotated[
    Placement | None, typer.Option("--placement", help="Where the drafter runs.", rich_help_panel=_PANEL)
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32, of the target.", rich_help_panel=_PANEL)]
Device = Annotated[str, typer.Option(help="Device of the target: cpu, cuda:0, ...", rich_help_panel=_PANEL)]
DrafterDevice = Annotated[str, typer.Option(help="Device of the drafter.", rich_help_panel=_PANEL)]
VerifierCores = Annotated[
    str | None, typer.Option(help="Cores of the target, such as 0-3.", rich_help_panel=_PANEL)
]
DrafterCores = Annotated[str | None, typer.Option(help="Cores of the drafter.", rich_help_panel=_PANEL)]
DraftLength = Annotated[
    int | None,
    typer.Option(
        help="Tokens per draft; by default the scheduler decides.",
        min=0,
        max=MAX_DRAFT_LENGTH,
        rich_help_panel=_PANEL,
    ),
]
NgramTokens = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of an n-gram proposal from the text itself; 0 for none.",
        min=0,
        max=MAX_DRAFT_LENGTH,
        rich_help_panel=_PANEL,
    ),
]
LogDir = Annotated[
    Path | None, typer.Option(help="Keep the logs of all processes here.", rich_help_panel=_PANEL)
]
StartTimeout = Annotated[
    float,
    typer.Option(
        "--start-timeout-s", help="Seconds to wait for all processes.", min=1, rich_help_panel=_PANEL
    ),
]


def read(
    console: Console,
    *,
    model: str,
    drafter: str | None,
    placement: Placement | None,
    dtype: str,
    device: str,
    drafter_device: str,
    verifier_cores: str | None,
    drafter_cores: str | None,
    draft_length: int | None,
    ngram_tokens: int | None,
    log_dir: Path | None,
    start_timeout_s: float,
    ports: Ports | None,
) -> DeploymentOptions:
    """Options from flags.

    Raises:
        PacelineError: a model or drafter does not exist here, or a flag does not parse.
    """
    model_dir = find_model(model)
    drafter_dir = find_drafter(drafter, model)
    return DeploymentOptions(
        model=model_dir,
        drafter=drafter_dir,
        placement=choose_placement(placement, drafter_dir, model, console),
        dtype=dtype,
        verifier_device=device,
        drafter_device=drafter_device,
        verifier_cores=None if verifier_cores is None else parse_cores(verifier_cores),
        drafter_cores=None if drafter_cores is None else parse_cores(drafter_cores),
        draft_length=draft_length,
        ngram_tokens=ngram_tokens,
        log_dir=None if log_dir is None else log_dir.resolve(),
        start_timeout_s=start_timeout_s,
        ports=ports,
    )
