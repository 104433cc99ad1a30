"""``paceline train``: a command for each method, with the run's options and the method's own."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

import paceline
from paceline.cli import main
from paceline.methods.registry import METHODS, training_recipe
from paceline.training.trainer import TrainOptions

TRAINABLE = [name for name, method in METHODS.items() if method.recipe is not None]
DOCS = Path(paceline.__file__).parent.parent / "docs" / "methods"
REQUIRED = [
    word
    for name in ("model-dir", "data-dir", "heldout-dir", "run-dir", "export-dir")
    for word in (f"--{name}", "x")
]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code, and what was printed on one line."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    return int(caught.value.code or 0), " ".join((captured.out + captured.err).split())


def flags_of(options_class: type) -> set[str]:
    return {"--" + name.replace("_", "-") for name in options_class.__dataclass_fields__}  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", TRAINABLE)
def test_help_has_the_run_s_options_and_the_method_s_own_alone(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(capsys, "train", method, "--help")
    assert code == 0
    shown = set(re.findall(r"(--[a-z][a-z-]*) <", text))
    assert shown == flags_of(TrainOptions) | flags_of(training_recipe(method).options)


@pytest.mark.parametrize("method", TRAINABLE)
def test_every_option_is_described_and_belongs_to_the_run_or_to_the_method(method: str) -> None:
    from paceline.cli.dataclass_options import attribute_texts

    own = training_recipe(method).options
    assert not flags_of(TrainOptions) & flags_of(own)
    assert set(attribute_texts(own)) == {field.name for field in dataclasses.fields(own)}


def test_another_method_s_flag_is_refused_and_the_method_s_own_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = said(capsys, "train", "eagle3", *REQUIRED, "--block-size=4")
    assert code == 2
    assert "No such option: --block-size" in text
    assert "--draft-vocab, --test-steps, --step-decay" in text


def test_an_unknown_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "train", "oracle", *REQUIRED)
    assert code == 1
    assert "'oracle'" in text
    assert "eagle3" in text


def test_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "train", "--help")
    assert code == 0
    assert all(re.search(rf"\b{name}\b", text) for name in TRAINABLE)


def test_documented_commands_have_flags_of_their_method() -> None:
    commands = []
    for page in DOCS.glob("*.md"):
        text = page.read_text().replace("\\\n", " ")
        commands += re.findall(r"^paceline train (\w+) (.*)$", text, re.MULTILINE)
    assert len(commands) > 8
    for method, words in commands:
        flags = {word.partition("=")[0] for word in shlex.split(words) if word.startswith("--")}
        assert flags <= flags_of(TrainOptions) | flags_of(training_recipe(method).options), method
