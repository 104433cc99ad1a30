"""The fixed prompts of the benchmark: those embedded in the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn; `kind` is chat, code or summary."""

    prompt_id: str
    kind: str
    text: str


def embedded_prompts(count: int | None = None) -> list[Prompt]:
    """The embedded prompts, the kinds in turn, so that any head of the list is mixed."""
    raw = json.loads(files("paceline").joinpath("assets/prompts.json").read_text())
    prompts = [Prompt(entry["id"], entry["kind"], entry["text"]) for entry in raw]
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    mixed = [
        prompt
        for place in range(len(prompts))
        for group in by_kind.values()
        for prompt in group[place : place + 1]
    ]
    return mixed[:count]
