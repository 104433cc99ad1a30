"""What a checkpoint's configuration must be before anything of it is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.methods.checkpoint import CheckpointError, DrafterConfig

GOOD = {
    "method": "eagle3",
    "target_fingerprint": "ab12",
    "target_name": "tiny",
    "shape": {"hidden": 64, "fc_bias": True},
    "training": {},
    "format_version": 1,
}


def read(path: Path, content: object) -> DrafterConfig:
    (path / "config.json").write_text(json.dumps(content))
    return DrafterConfig.read(path)


def test_a_configuration_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD)
    assert (config.method, config.size("hidden"), config.flag("fc_bias")) == ("eagle3", 64, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format_version"),
        ({"surplus": 1}, "unknown fields"),
        ({"method": 3}, "method must be a text"),
        ({"target_fingerprint": None}, "target_fingerprint must be a text"),
        ({"shape": [1]}, "shape must be an object"),
        ({"training": "long"}, "training must be an object"),
    ],
)
def test_fields_that_are_wrong_are_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, GOOD | change)


@pytest.mark.parametrize("content", [[], 3, {"method": "eagle3"}])
def test_what_is_no_configuration_is_refused(content: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read(tmp_path, content)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_sizes_are_positive_whole_numbers(value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"shape\.hidden"):
        read(tmp_path, GOOD | {"shape": {"hidden": value}}).size("hidden")
