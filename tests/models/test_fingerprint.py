"""Fingerprints: the same for the same model however it is stored, different for any other, without torch."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.models import UnknownModelError, model_fingerprint, tokenizer_fingerprint
from tests.models.conftest import ModelWriter

CONFIG = {"model_type": "llama", "hidden_size": 8, "transformers_version": "5.0"}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(40, 8, generator=generator) for name in ("a", "b", "c", "d")}


def test_storage_does_not_matter(write_model: ModelWriter) -> None:
    expected = model_fingerprint(write_model(tensors(), CONFIG))
    assert expected == model_fingerprint(write_model(tensors(), CONFIG, num_shards=3))
    assert expected == model_fingerprint(write_model(tensors(), {**CONFIG, "transformers_version": "6.0"}))


def test_anything_that_computes_differently_differs(write_model: ModelWriter) -> None:
    changed = [
        (tensors(), {**CONFIG, "rope_theta": 5.0}),
        ({name: -value for name, value in tensors().items()}, CONFIG),
        ({**tensors(), "d": tensors()["d"].half()}, CONFIG),
        ({**tensors(), "d": tensors()["d"].reshape(20, 16)}, CONFIG),
        ({("e" if name == "d" else name): value for name, value in tensors().items()}, CONFIG),
    ]
    found = {model_fingerprint(write_model(weights, config)) for weights, config in changed}
    found.add(model_fingerprint(write_model(tensors(), CONFIG)))
    assert len(found) == len(changed) + 1


def test_small_tensors_are_covered_in_full(write_model: ModelWriter) -> None:
    weights = {"scale": torch.ones(3)}
    first = model_fingerprint(write_model(weights, CONFIG))
    weights["scale"][1] = 2.0
    assert model_fingerprint(write_model(weights, CONFIG)) != first


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[[",
        struct.pack("<Q", 4) + b"[12]",
        struct.pack("<Q", 10) + b'{"a": 123}',
        *(
            struct.pack("<Q", len(text)) + text
            for text in (
                b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
                b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 0]}}',
                b'{"a": {"dtype": "F32", "shape": [4]}}',
            )
        ),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnknownModelError):
        model_fingerprint(tmp_path)


def test_tokenizer_fingerprint_ignores_padding_only(tmp_path: Path) -> None:
    content = {"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": [], "padding": None}

    def of(**changes: object) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps({**content, **changes}))
        return tokenizer_fingerprint(tmp_path)

    expected = of()
    assert of(padding={"strategy": "longest"}) == expected
    assert of(model={"type": "BPE", "vocab": {"b": 0}}) != expected
    assert of(added_tokens=[{"id": 1}]) != expected


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"tokenizer\.json"):
        tokenizer_fingerprint(tmp_path)
    with pytest.raises(UnknownModelError, match=r"config\.json"):
        model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(UnknownModelError, match="JSON"):
        model_fingerprint(tmp_path)
    shutil.rmtree(tmp_path)


def test_the_package_imports_no_torch() -> None:
    script = "import sys, paceline.models; assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
