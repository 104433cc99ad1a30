"""A target and a drafter with tokenizers of two families, small enough to see through."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|pad|>", "<|user|>", "<|end|>"]
TEXT = (
    "A rider at the front of a line saves the others most of their work. They take turns, and so the line is faster "
    "than each of them. The wind decides how long a turn lasts: a short one into it, a long one with it behind. "
    "Über die Höhe hinweg zählt das Gewicht, sagt Łukasz; naïve riders learn it on the first climb. "
)


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes and the merges that a short text teaches; three special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama 2's family: "▁" for a space, byte tokens for rare characters, <s> in front; it knows <|end|>, too."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT[:260]], trainer)
    content = json.loads(tokenizer.to_str())
    for token in content[
        "added_tokens"
    ]:  # the trainer makes byte tokens special, which no real tokenizer does
        token["special"] = not token["content"].startswith("<0x")
    content["added_tokens"] = [token for token in content["added_tokens"] if token["special"]]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def tiny_tokenizer(tokens: list[str], merges: list[tuple[str, str]], space: str) -> Tokenizer:
    """A handful of tokens in which "Ġ" (byte level) or "▁" stands for a space."""
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if space == "Ġ":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens if token[0] == "<"])
    return tokenizer


def save_model(
    path: Path, tokenizer: Tokenizer | None, vocab: int, *, seed: int, num_layers: int = 1, tied: bool = True
) -> Path:
    """A random Llama of 32 numbers a token, with a tokenizer beside it if one is given."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.4,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    return path
