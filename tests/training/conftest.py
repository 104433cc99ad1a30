"""Tiny targets, one with a chat template and one without, and text that they wrote themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.training.continuations import ContinueOptions
from paceline.training.continuations import run as write_continuations
from paceline.training.conversations import SynthOptions
from paceline.training.features import FeatureOptions
from paceline.training.features import run as add_features
from paceline.training.synth import run as synthesise
from tests.methods.gemma4_checkpoint import save_gemma3

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over bytes: 4 layers, 64 wide, chat template with `<|im_end|>` = 2."""
    path = tmp_path_factory.mktemp("target")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "tokenizer_config.json").write_text("{}")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def synth_options(target_dir: Path, out_dir: Path, **changes: object) -> SynthOptions:
    """Small and quick: 16 conversations of at most 72 tokens a shard, float32."""
    settings: dict[str, object] = {
        "rows": 16,
        "max_tokens": 72,
        "max_user_tokens": 6,
        "dtype": "float32",
        "num_threads": 1,
        **changes,
    }
    return SynthOptions(target_dir, out_dir, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def text_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards to train on."""
    path = tmp_path_factory.mktemp("text")
    synthesise(synth_options(target_dir, path, seed=1, num_shards=2))
    return path


@pytest.fixture(scope="session")
def heldout_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard of another seed."""
    path = tmp_path_factory.mktemp("heldout")
    synthesise(synth_options(target_dir, path, seed=2, num_shards=1, greedy_fraction=1.0))
    return path


def give_tokenizer(path: Path, source: Path) -> Path:
    """Gives a model directory the bytes of the tiny Llama ``source`` that fit its table."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: i for token, i in vocab.items() if i < size}
    tokenizer["model"]["unk_token"] = SPECIAL[0]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.fixture(scope="session")
def gemma3_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 whose sliding layers see eight tokens."""
    return give_tokenizer(save_gemma3(tmp_path_factory.mktemp("gemma3")), target_dir)


def continued(model_dir: Path, out_dir: Path, seed: int, num_shards: int = 1) -> Path:
    """Text without features: eight texts of 60 tokens a shard, greedy."""
    write_continuations(
        ContinueOptions(
            model_dir,
            out_dir,
            seed=seed,
            num_shards=num_shards,
            rows=8,
            max_tokens=60,
            ask_fraction=0.0,
            greedy_fraction=1.0,
            dtype="float32",
            num_threads=1,
        )
    )
    return out_dir


@pytest.fixture(scope="session")
def gemma3_text_dirs(gemma3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Text to learn from and held-out text of the tiny Gemma, with features."""
    folders = []
    for seed in (1, 2):
        folder = continued(gemma3_dir, tmp_path_factory.mktemp("gemma3-text"), seed)
        add_features(FeatureOptions(gemma3_dir, folder, dtype="float32", num_threads=1))
        folders.append(folder)
    return folders[0], folders[1]
