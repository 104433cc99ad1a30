"""What a drafting method declares before any of its heavy parts are imported.

Each method's package has a `METHOD` in its `__init__.py`. A method names its parts that need torch as
"module:attribute", as entry points do; they are imported when they are used. Knows no method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from paceline.methods.checkpoint import DrafterConfig
    from paceline.methods.drafter import Drafter
    from paceline.target import Device, TapSpec

PLACEMENTS = ("colocated", "separate")
"""Where a drafter may run. Both host the same class, so every method has both."""


class DrafterClass(Protocol):
    """How a method's checkpoints become a drafter."""

    @property
    def method(self) -> str:
        """Name of the method, as checkpoints give it."""

    def read_tap(self, directory: Path, config: DrafterConfig) -> TapSpec | None:
        """The features that a checkpoint's drafter reads, with their projection; None where it reads tokens alone.

        Raises:
            CheckpointError: the checkpoint cannot be used.
        """

    def load(
        self, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Drafter:
        """Load a checkpoint for a target.

        Raises:
            CheckpointError: the checkpoint cannot be used.
        """


@dataclass(frozen=True, slots=True)
class Method:
    """A drafting method.

    Attributes:
        name: as checkpoints and `paceline train` give it.
        reads: what it reads of the target, in words.
        drafter: its `DrafterClass`, as "module:attribute".
        recipe: how it is trained, a `paceline.training.recipe.Recipe`, as "module:attribute"; None if it cannot be.
        is_one_pass: whether one pass makes all tokens of a draft. Such a draft takes the same time whatever its length,
            and it cannot continue past a verification outcome before the outcome's token and features have arrived.
        ahead_fraction: of the tokens that a draft from true features gets accepted, the fraction that a draft gets
            accepted which was made past a verification outcome, on the drafter's own outputs. Measured with
            `python -m experiments.ahead` (docs/methods/README.md). Methods that read tokens alone keep 1.
        serves: formats that a drafter is loaded from as they are.
        layouts: public layouts that its checkpoints are imported from and exported to, by name: each a
            `paceline.methods.layouts.layout.Layout`, as "module:attribute".
        speculators: its kind in the speculators format (`paceline.methods.speculators.kind`), as "module:attribute".
        draft_map: tensor that says which of the target's tokens a drafter proposes: "token_map" has their ids, "d2t"
            each id less its index, with marks of them in "t2d". None where the vocabulary of a trained drafter cannot
            be cut.
        draft_rows: prefixes of tensors with a row for each token that a drafter proposes.
    """

    name: str
    reads: str
    drafter: str
    is_one_pass: bool
    ahead_fraction: float = 1.0
    recipe: str | None = None
    serves: tuple[str, ...] = ("paceline",)
    layouts: Mapping[str, str] = field(default_factory=dict)
    speculators: str | None = None
    draft_map: Literal["token_map", "d2t"] | None = None
    draft_rows: tuple[str, ...] = ("lm_head.", "lm_heads.")

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of all formats that its checkpoints come in."""
        return (*self.serves, *self.layouts)

    def drafter_class(self) -> DrafterClass:
        """Import the class whose `load` makes drafters."""
        found: DrafterClass = load_reference(self.drafter)
        return found


def load_reference(reference: str) -> Any:
    """Import what "module:attribute" names."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)
