"""The tokens that a chat template puts around a user turn, found by rendering the template once.

Knows the template's text and the tokenizer; called by :mod:`paceline.training.synth`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from paceline.contract.errors import TrainingDataError

_MARK = "\u241fturn\u241f"


@dataclass(frozen=True, slots=True)
class TurnTemplate:
    """Token ids around a user turn.

    Attributes:
        header: everything before the user's first token (the default system block included).
        switch: from the end of the user's turn to the assistant's first token; begins with ``end_of_turn``.
        end_of_turn: the id that closes a turn.
    """

    header: tuple[int, ...]
    switch: tuple[int, ...]
    end_of_turn: int

    @classmethod
    def load(cls, model_dir: Path, tokenizer: Tokenizer) -> TurnTemplate:
        """Renders the model's chat template around a marker and cuts at the marker.

        Raises:
            TrainingDataError: the model has no template, or one that alters the user's text.
        """
        path = model_dir / "chat_template.jinja"
        config_path = model_dir / "tokenizer_config.json"
        config = json.loads(config_path.read_text()) if config_path.exists() else {}
        source = path.read_text() if path.exists() else config.get("chat_template")
        if not isinstance(source, str):
            raise TrainingDataError(f"{model_dir}: no chat template")
        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
        names = {k: v for k, v in config.items() if k.endswith("_token") and isinstance(v, str)}
        text = template.render(
            messages=[{"role": "user", "content": _MARK}], add_generation_prompt=True, **names
        )
        before, found, after = text.partition(_MARK)
        if not found or not after:
            raise TrainingDataError(f"{model_dir}: the chat template hides where a user turn starts or ends")
        header = tokenizer.encode(before, add_special_tokens=False).ids
        switch = tokenizer.encode(after, add_special_tokens=False).ids
        return cls(header=tuple(header), switch=tuple(switch), end_of_turn=switch[0])
