"""The fixed prompts that come with the package: the benchmark's, and others for evaluating drafters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn; `kind` is chat, code or summary."""

    prompt_id: str
    kind: str
    text: str


def embedded_prompts(count: int | None = None) -> list[Prompt]:
    """The embedded prompts, the kinds in turn, so that any head of the list is mixed."""
    return _mixed(_read("prompts.json"))[:count]


def held_out_prompts(per_kind: int | None = None) -> list[Prompt]:
    """Prompts that no drafter was trained or tuned on, so many of each kind, the kinds in turn."""
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in _read("heldout_prompts.json"):
        by_kind.setdefault(prompt.kind, []).append(prompt)
    return _mixed([prompt for group in by_kind.values() for prompt in group[:per_kind]])


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """A user turn in a transformers tokenizer's chat template; the bare text where it has none."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(text))
    turn = [{"role": "user", "content": text}]
    return list(
        tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def _read(name: str) -> list[Prompt]:
    raw = json.loads(files("paceline").joinpath("assets", name).read_text(encoding="utf-8"))
    return [Prompt(entry["id"], entry["kind"], entry["text"]) for entry in raw]


def _mixed(prompts: list[Prompt]) -> list[Prompt]:
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    return [
        prompt
        for place in range(len(prompts))
        for group in by_kind.values()
        for prompt in group[place : place + 1]
    ]
