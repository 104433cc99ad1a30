"""A target that computes next to nothing: a Llama of two layers with random weights and a vocabulary of 300.

Its steps take a few milliseconds, so that a step curve decides how long they last. Its text is its own: what it says is
nobody's, but it is what its weights say, and drafts must not change it.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCAB_SIZE = 300
MAX_POSITIONS = 2048
_SPECIAL = ("<|begin|>", "<|end|>")


def write_target(directory: Path, seed: int = 5) -> Path:
    """Writes the model directory, tokenizer and chat template included, and returns it.

    Args:
        directory: is made where it is missing.
        seed: of the weights.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    names = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<|spare {number}|>" for number in range(VOCAB_SIZE - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": _SPECIAL[0], "eos_token": _SPECIAL[1]}), encoding="utf-8"
    )
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}", encoding="utf-8"
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
