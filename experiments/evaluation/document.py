"""An evaluation as one document of plain data, to which targets and drafters are added one by one.

Responsible for: what stands in the file that `paceline evaluate --json` writes, what two of them must have in common to
be one, and for a file that is whole at any time. Deliberately does not know: how figures come about or are shown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench.report import commit, processor
from experiments.evaluation.figures import figures_of
from experiments.evaluation.measure import Contestant, Stage
from experiments.evaluation.plan import Plan
from paceline import __version__
from paceline.atomic_write import write_json
from paceline.contract.errors import InvalidRequestError
from paceline.methods.registry import METHODS
from paceline.models import model_fingerprint

ORIGINS = ("commands", "versions", "commits", "machines")
"""Where figures come from; a document of several runs names all of them."""

SETTINGS = ("prompts", "rounds", "max_tokens", "draft_length", "max_nodes", "temperatures", "mode", "seed")
"""What figures depend on, and so what documents must have in common to be one."""


def begin(plan: Plan, kinds: Sequence[str], threads: int, command: str) -> dict[str, Any]:
    """A document without targets.

    Args:
        plan: the settings.
        kinds: of the prompts.
        threads: torch threads.
        command: for people.
    """
    return {
        "commands": [command],
        "versions": [__version__],
        "commits": [commit()],
        "machines": [f"{processor()}, {threads} {'thread' if threads == 1 else 'threads'}"],
        "prompts": dict(Counter(kinds)),
        "rounds": plan.rounds,
        "max_tokens": plan.max_tokens,
        "draft_length": plan.draft_length,
        "max_nodes": plan.max_nodes,
        "temperatures": list(plan.temperatures),
        "mode": plan.mode.value,
        "seed": plan.seed,
        "targets": [],
    }


def target_marks(plan: Plan) -> dict[str, Any]:
    """What tells targets apart: the model, and the arithmetic it runs in."""
    return {
        "fingerprint": model_fingerprint(plan.model_dir),
        "dtype": plan.dtype,
        "device": plan.device,
    }


def target_entry(plan: Plan, stage: Stage) -> dict[str, Any]:
    """What a document says of a target, with no drafters yet."""
    executor = type(stage.engine.executor).__name__
    return {"name": plan.model_dir.name, **target_marks(plan), "executor": executor, "drafters": []}


def drafter_entry(
    contestant: Contestant, fingerprint: str, blocks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a document says of a drafter.

    Args:
        contestant: with the generations of each way.
        fingerprint: of its checkpoint.
        blocks: what `latency` gave for it; none where it was not asked for.
    """
    training = contestant.config.training
    return {
        "name": contestant.name,
        "fingerprint": fingerprint,
        "method": contestant.config.method,
        "reads": METHODS[contestant.config.method].reads,
        "num_bytes": sum(file.stat().st_size for file in contestant.directory.rglob("*.safetensors")),
        "training": {name: training.get(name) for name in ("tokens", "steps", "seconds")},
        "results": [figures_of(way) for way in contestant.ways],
        "latency": list(blocks),
    }


def find_target(document: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any] | None:
    """The entry of a target, by the marks of `target_marks`."""
    marks = ("fingerprint", "dtype", "device")
    found = [one for one in document["targets"] if all(one[mark] == target[mark] for mark in marks)]
    return found[0] if found else None


def holds(
    document: Mapping[str, Any], target: Mapping[str, Any], name: str, fingerprint: str, *, has_blocks: bool
) -> bool:
    """Whether a drafter's figures are there.

    Args:
        document: that may hold them.
        target: its entry, or its marks.
        name: of the drafter.
        fingerprint: of its checkpoint; another one under the same name is another drafter.
        has_blocks: whether times of blocks must be there too.
    """
    known = find_target(document, target)
    return known is not None and any(
        (one["name"], one["fingerprint"]) == (name, fingerprint) and (bool(one["latency"]) or not has_blocks)
        for one in known["drafters"]
    )


def add(document: dict[str, Any], target: Mapping[str, Any], drafter: Mapping[str, Any]) -> None:
    """Put in a drafter's figures; they replace those of its name for the same target."""
    known = find_target(document, target)
    if known is None:
        known = {**target, "drafters": []}
        document["targets"].append(known)
    names = [one["name"] for one in known["drafters"]]
    if drafter["name"] in names:
        known["drafters"][names.index(drafter["name"])] = dict(drafter)
    else:
        known["drafters"].append(dict(drafter))


def merge(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document of several; of a drafter that several have, the last one's figures stay.

    Raises:
        InvalidRequestError: they were made with different settings; names the first of these.
    """
    first = documents[0]
    merged: dict[str, Any] = {**first, "targets": []}
    for document in documents:
        for name in SETTINGS:
            if document[name] != first[name]:
                raise InvalidRequestError(
                    "from-json",
                    f"{name} differs: {first[name]!r} and {document[name]!r}; that is no one table",
                )
        for name in ORIGINS:
            merged[name] = list(dict.fromkeys([*merged[name], *document[name]]))
        for target in document["targets"]:
            for drafter in target["drafters"]:
                add(merged, target, drafter)
    return merged


def read(path: Path) -> dict[str, Any]:
    """Read what :func:`write` wrote.

    Raises:
        InvalidRequestError: it is not there, or no such document.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError("json", f"{path} cannot be read: {error}") from None
    needed = (*ORIGINS, *SETTINGS, "targets")
    missing = [name for name in needed if name not in document] if isinstance(document, dict) else needed
    if missing:
        raise InvalidRequestError("json", f"{path} is no evaluation: {', '.join(missing)} missing")
    return dict(document)


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document in one go: a run that is stopped leaves the one before."""
    write_json(path, dict(document))
