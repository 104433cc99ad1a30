"""Short identities of a model and of a tokenizer, by which peers check that they belong together.

Responsible for: a stable digest from files alone: no torch, no transformers, a few milliseconds. It protects
against mistakes, not against forgery: weights are sampled, not read in full. Called by verifier, drafter and
gateway for their handshakes, and as a key of stored cost curves.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from paceline.models.registry import UnknownModelError

BLOCKS_PER_TENSOR = 8
BLOCK_BYTES = 64
MAX_HEADER_BYTES = 100 << 20
# Keys that depend on how the files were saved, and do not change what the model computes.
VOLATILE_CONFIG_KEYS = frozenset(
    {"transformers_version", "_name_or_path", "_model_name_or_path", "torch_dtype", "dtype", "use_cache"}
)
# The rest of the file determines token ids. The chat template determines text, so it belongs to the prompt,
# not here.
TOKENIZER_VOLATILE_KEYS = frozenset({"truncation", "padding"})


def model_fingerprint(model_dir: str | Path) -> str:
    """Digest of config, tensor names, shapes, dtypes and sampled bytes: 64 hex digits.

    Raises:
        UnknownModelError: not a model directory, or a malformed safetensors file.
    """
    path = Path(model_dir)
    digest = hashlib.sha256()
    config = _read_json(path / "config.json")
    _add(digest, {key: value for key, value in config.items() if key not in VOLATILE_CONFIG_KEYS})
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UnknownModelError(f"{path.name!r} has no safetensors weights")
    tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for file in files:
        start, header = _read_header(file)
        for name, entry in header.items():
            tensors[name] = (file, start, entry)
    # By name and not by file: the same weights in other shards are the same model.
    for name in sorted(tensors):
        file, start, entry = tensors[name]
        _add(digest, [name, entry["dtype"], entry["shape"]])
        first, end = entry["data_offsets"]
        with file.open("rb") as stream:
            for block in range(BLOCKS_PER_TENSOR):
                offset = first + (max(end - first - BLOCK_BYTES, 0) * block) // (BLOCKS_PER_TENSOR - 1)
                stream.seek(start + offset)
                digest.update(stream.read(min(BLOCK_BYTES, end - offset)))
    return digest.hexdigest()


def tokenizer_fingerprint(model_dir: str | Path) -> str:
    """Digest of everything in `tokenizer.json` that maps text to ids and back: 64 hex digits.

    Raises:
        UnknownModelError: there is no `tokenizer.json`.
    """
    content = _read_json(Path(model_dir) / "tokenizer.json")
    digest = hashlib.sha256()
    _add(digest, {key: value for key, value in content.items() if key not in TOKENIZER_VOLATILE_KEYS})
    return digest.hexdigest()


def _add(digest: Any, value: object) -> None:
    digest.update(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnknownModelError(f"{path.parent.name!r} has no {path.name}") from None
    except ValueError as error:
        raise UnknownModelError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnknownModelError(f"{path.name} is not a JSON object")
    return content


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Byte offset of the data and the header of a safetensors file, checked before use."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise UnknownModelError(f"{path.name} is not a safetensors file")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise UnknownModelError(f"{path.name} has a malformed header") from error
    start = 8 + length
    if not isinstance(header, dict):
        raise UnknownModelError(f"{path.name} has a malformed header")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not _is_tensor_entry(entry, size - start):
            raise UnknownModelError(f"{path.name}: tensor {name!r} is malformed or lies outside the file")
    return start, header


def _is_tensor_entry(entry: Any, data_bytes: int) -> bool:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return False
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(x, int) for x in offsets):
        return False
    return bool(0 <= offsets[0] <= offsets[1] <= data_bytes)
