"""A model directory with a tokenizer of a few hundred tokens and a chat template, made by the test itself."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PLAIN_ADDED = "<|im_start|>", "<|im_end|>", "<plain ä>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes, a few merges, two special tokens, one added token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {BOS: 0, EOS: 1, PLAIN_ADDED: 2}
    for character in alphabet:
        vocab[character] = len(vocab)
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "¤"), ("ð", "Ł")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.add_tokens([AddedToken(PLAIN_ADDED, normalized=False)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """The decoder of the Llama 2 family: "▁" for spaces, byte tokens for characters outside the vocabulary."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for character in "▁abcdefghijklmnopqrstuvwxyz.,":
        vocab[character] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_model_dir(directory: Path) -> Path:
    """Writes what the gateway reads of a model."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = {"bos_token": BOS, "eos_token": {"content": EOS}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
