"""A model's configuration as transformers reads it: with defaults, older spellings and kinds of layers resolved.

Responsible for reading ``config.json`` and for errors that say what is wrong with it. Knows no sizes and no forward
pass. Called by all of training that takes its sizes from a target.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from paceline.contract.errors import TrainingDataError

_MALFORMED = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError),
    StrictDataclassError,
)
"""What transformers' classes raise for a configuration that they cannot use."""


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
        TrainingDataError: the file is absent, or holds no JSON object.
    """
    path = model_dir / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingDataError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise TrainingDataError(f"{path}: not an object")
    return content


def parse_configuration(content: Mapping[str, Any]) -> Any:
    """The transformers configuration of a ``config.json``; does not change ``content``.

    Raises:
        TrainingDataError: the model type is absent or unknown to transformers, or a value cannot be used.
    """
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise TrainingDataError(f"model_type {model_type!r} is not known")
    try:
        # A copy: transformers completes nested objects in place.
        return AutoConfig.for_model(**copy.deepcopy(dict(content)))
    except _MALFORMED as error:
        raise TrainingDataError(f"the configuration of a {model_type!r}: {_on_one_line(error)}") from error


def text_part(config: Any) -> Any:
    """The text decoder's part of a transformers configuration; the configuration itself where it has one part.

    Raises:
        TrainingDataError: the text decoder cannot be determined.
    """
    try:
        text = config.get_text_config(decoder=True)
    except _MALFORMED as error:
        raise TrainingDataError(
            f"the configuration of a {config.model_type!r}: {_on_one_line(error)}"
        ) from error
    if not isinstance(text, PreTrainedConfig):
        raise TrainingDataError(f"the text part of a {config.model_type!r} is no configuration")
    return text


def _on_one_line(error: BaseException) -> str:
    # A KeyError's own text is its argument's repr.
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split())
