"""Fetching: exact bytes or nothing, a directory that loads, and no second download."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from paceline.models import NotFetchedError, UnknownModelError, cached, resolve
from paceline.models.fetch import PROVENANCE_FILE, FetchError, fetch
from paceline.models.registry import MODELS
from paceline.target import SequenceRows, TargetEngine
from tests.models.conftest import Index


def quiet() -> Console:
    return Console(file=io.StringIO())


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("models/*"))


def test_a_fetched_model_loads_and_says_where_it_is_from(index: Index, cache: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    console = quiet()
    path = fetch(index.entry, pip_options=index.pip_options, console=console)
    assert path == cache / "models" / "tiny"
    assert leftovers(cache) == ["tiny"]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Apache-2.0" in shown
    assert "random numbers" in shown
    assert json.loads((path / PROVENANCE_FILE).read_text())["sha256"] == index.entry.sha256
    assert (path / "TERMS-tiny_part2.txt").read_bytes() == b"terms"
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("the path")["input_ids"]
    assert tokenizer.decode(ids) == "the path"
    assert 258 in ids  # the merge survived
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.generation_config.eos_token_id == 257
    engine = TargetEngine.load(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    got = engine.step([SequenceRows(engine.open(), ids)]).logits[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    # A second call needs no index at all.
    again = fetch(index.entry, pip_options=["--no-index", "--find-links=/nonexistent"], console=quiet())
    assert again == path


def test_other_bytes_are_refused_and_leave_nothing(index: Index, cache: Path) -> None:
    first, second = index.entry.packages
    forged = [
        dataclasses.replace(index.entry, sha256="0" * 64),
        dataclasses.replace(index.entry, packages=(dataclasses.replace(first, sha256="0" * 64), second)),
        dataclasses.replace(index.entry, packages=(second, first)),
    ]
    for entry in forged:
        with pytest.raises(FetchError, match="SHA-256"):
            fetch(entry, pip_options=index.pip_options, console=quiet())
        assert leftovers(cache) == []
        assert cached("tiny") is None


def test_a_missing_package_is_named(index: Index, cache: Path) -> None:
    first, second = index.entry.packages
    entry = dataclasses.replace(index.entry, packages=(first, dataclasses.replace(second, version="2.0")))
    with pytest.raises(FetchError, match=r"tiny_part2==2\.0"):
        fetch(entry, pip_options=index.pip_options, console=quiet())
    assert leftovers(cache) == []


def test_names_and_paths_resolve(cache: Path, tmp_path: Path) -> None:
    name = next(iter(MODELS))
    with pytest.raises(NotFetchedError, match="models fetch"):
        resolve(name)
    for unknown in ("no-such-model", "owner/name", tmp_path):
        with pytest.raises(UnknownModelError):
            resolve(unknown)
    made = cache / "models" / name
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"")
    assert resolve(name) == made
    assert resolve(str(made)) == made


def test_the_registry_is_consistent() -> None:
    for name, entry in MODELS.items():
        assert name == entry.name
        for digest in [entry.sha256, *(package.sha256 for package in entry.packages)]:
            assert len(bytes.fromhex(digest)) == 32
        assert any(package.notices for package in entry.packages)
        assert entry.is_open == (entry.licence == "Apache-2.0")
