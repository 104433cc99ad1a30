"""A configuration read as it is written is the one transformers makes of it, or it is not read so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.model.architecture import Architecture
from paceline.model.configuration import (
    read_configuration,
    stated_configuration,
    transformers_configuration,
)
from tests.target.conftest import FAMILIES, ModelFactory


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_transformers_reads_it(tiny_model: ModelFactory, family: str) -> None:
    path = tiny_model(family)
    assert (stated_configuration(path) is not None) == (family == "llama")
    expected = transformers_configuration(path)
    found = read_configuration(path)
    assert Architecture.from_config(found) == Architecture.from_config(expected)
    assert found.rope_parameters == expected.rope_parameters


def test_the_default_model_states_everything(smollm2_dir: Path) -> None:
    found = stated_configuration(smollm2_dir)
    assert found is not None
    expected = transformers_configuration(smollm2_dir)
    assert Architecture.from_config(found) == Architecture.from_config(expected)


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": None},
        {"head_dim": "64"},
        {"tie_word_embeddings": 1},
        {"hidden_act": "gelu"},
        {"model_type": "qwen2"},
        {"sliding_window": 7},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default"}},
    ],
    ids=str,
)
def test_what_might_mean_more_is_left_to_transformers(
    tiny_model: ModelFactory, tmp_path: Path, change: dict[str, Any]
) -> None:
    content = json.loads((tiny_model("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, **change}))
    assert stated_configuration(tmp_path) is None


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "rope_parameters", "rms_norm_eps"])
def test_what_is_not_stated_is_left_to_transformers(
    tiny_model: ModelFactory, tmp_path: Path, key: str
) -> None:
    content = json.loads((tiny_model("llama") / "config.json").read_text())
    del content[key]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert stated_configuration(tmp_path) is None
    read_configuration(tmp_path)


def test_a_verifier_starts_without_transformers(tiny_model: ModelFactory) -> None:
    """Importing it took more of a start than loading the default model."""
    program = (
        "import sys, services.verifier.host, services.drafter.host; from paceline.target import TargetEngine; "
        f"TargetEngine.load({str(tiny_model('llama'))!r}); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
