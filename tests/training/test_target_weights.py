"""What drafters share with their target is found by name, or refused by name before anything long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from paceline.contract.errors import TrainingDataError
from paceline.methods.whole_model.cut_model import cut_model
from paceline.training import shards
from paceline.training.features import FeatureOptions
from paceline.training.features import run as add_features
from paceline.training.target_weights import (
    EMBEDDING,
    HEAD,
    check_target_tensors,
    read_embedding_and_head,
    read_final_norm,
)
from tests.training.conftest import continued, give_tokenizer
from tests.training.training_run import TrainingRun


def save_target(path: Path, tensors: dict[str, torch.Tensor], is_tied: bool = False) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": is_tied}))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def neox_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-NeoX, which the engine runs and whose tensors are named otherwise."""
    path = tmp_path_factory.mktemp("neox")
    torch.manual_seed(2)
    config = GPTNeoXConfig(
        vocab_size=108, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(path)
    return give_tokenizer(path, target_dir)


@pytest.fixture(scope="module")
def neox_text(neox_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that it wrote."""
    return continued(neox_dir, tmp_path_factory.mktemp("neox-text"), seed=1)


def test_features_of_a_target_that_no_drafter_is_trained_for_are_not_written(
    neox_dir: Path, neox_text: Path
) -> None:
    with pytest.raises(TrainingDataError, match=r"no tensor 'model\.embed_tokens\.weight'"):
        add_features(FeatureOptions(neox_dir, neox_text, dtype="float32", num_threads=1))
    assert shards.read_shard(shards.shard_path(neox_text, 0)).hidden is None


@pytest.mark.parametrize(
    "method", ["deepseek_mtp", "dflash", "eagle1", "eagle3", "gemma4_mtp", "medusa1", "p_eagle", "pard2"]
)
def test_training_names_what_the_target_has_under_no_such_name(
    method: str, neox_dir: Path, neox_text: Path, tmp_path: Path
) -> None:
    options = TrainingRun(method, neox_dir, neox_text, neox_text, tmp_path / "run", tmp_path / "export")
    with pytest.raises(TrainingDataError, match=r"no tensor 'model\.embed_tokens\.weight'"):
        options.train()


def test_a_head_of_its_own_is_missed_unless_the_embedding_is_shared(tmp_path: Path) -> None:
    table = {EMBEDDING: torch.ones(4, 2)}
    with pytest.raises(TrainingDataError, match=r"no tensor 'lm_head\.weight'"):
        check_target_tensors(save_target(tmp_path, table))
    embedding, head = read_embedding_and_head(save_target(tmp_path, table, is_tied=True))
    assert embedding is head
    _, head = read_embedding_and_head(save_target(tmp_path, {**table, HEAD: torch.zeros(4, 2)}))
    assert not head.any()


def test_a_head_with_more_than_a_product_is_refused(tmp_path: Path) -> None:
    tensors = {EMBEDDING: torch.ones(4, 2), HEAD: torch.ones(4, 2), "lm_head.bias": torch.ones(4)}
    with pytest.raises(TrainingDataError, match=r"'lm_head\.bias'"):
        read_embedding_and_head(save_target(tmp_path, tensors))


def test_a_cut_model_needs_them_too(tmp_path: Path) -> None:
    with pytest.raises(TrainingDataError, match=r"'model\.embed_tokens\.weight' and no 'lm_head\.weight'"):
        cut_model(save_target(tmp_path, {"other": torch.ones(1)}), 2)


def test_the_final_norm_is_what_it_multiplies_by(tmp_path: Path) -> None:
    stored = torch.tensor([-0.99, 0.5]).bfloat16()
    norm = read_final_norm(save_target(tmp_path, {"model.norm.weight": stored}), 1.0)
    assert torch.equal(norm, stored.float() + 1.0)  # bfloat16 would keep little of 0.01
    with pytest.raises(TrainingDataError, match=r"'model\.norm\.weight'"):
        read_final_norm(save_target(tmp_path, {"other": torch.ones(1)}), 0.0)
