"""The tokens with which a model ends a text, as its config files name them."""

from __future__ import annotations

import json
from pathlib import Path


def end_tokens(model_dir: Path) -> list[int]:
    """Tokens that end a text by default: the generation config's, else the model config's; empty if neither names
    any.
    """
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            if value is not None:
                return [int(token) for token in (value if isinstance(value, list) else [value])]
    return []
