"""Every drafting method, by name. A new method is a package and one line here.

Importing this module imports no torch. Called by the scheduler for what planning depends on, and by whatever loads,
trains, imports or lists drafters.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.contract.errors import TrainingDataError
from paceline.methods.method import Method, load_reference

if TYPE_CHECKING:
    from paceline.training.recipe import Recipe

_PACKAGES = (
    "paceline.methods.deepseek_mtp",
    "paceline.methods.dflash",
    "paceline.methods.dspark",
    "paceline.methods.eagle1",
    "paceline.methods.eagle2",
    "paceline.methods.eagle3",
    "paceline.methods.gemma4_mtp",
    "paceline.methods.independent",
    "paceline.methods.medusa1",
    "paceline.methods.medusa2",
    "paceline.methods.p_eagle",
    "paceline.methods.pard1",
    "paceline.methods.pard2",
)
"""Packages whose `__init__.py` has a `METHOD`."""

METHODS: dict[str, Method] = {}
"""By name, in the order of their packages."""


def register(package: str) -> Method:
    """Add the `METHOD` of a package to `METHODS`.

    Raises:
        ValueError: another method has this name.
    """
    method: Method = import_module(package).METHOD
    if METHODS.setdefault(method.name, method) is not method:
        raise ValueError(f"{package}: a method named {method.name!r} is registered already")
    return method


def training_recipe(name: str) -> Recipe[Any]:
    """How a method is trained.

    Raises:
        TrainingDataError: there is no such method, or it cannot be trained.
    """
    method = METHODS.get(name)
    if method is None or method.recipe is None:
        known = ", ".join(sorted(each.name for each in METHODS.values() if each.recipe is not None))
        raise TrainingDataError(f"method {name!r} is none of those that can be trained: {known}")
    recipe: Recipe[Any] = load_reference(method.recipe)
    return recipe


for _package in _PACKAGES:
    register(_package)
