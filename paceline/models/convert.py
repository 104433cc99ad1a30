"""From a GGUF file to a directory that transformers and the target engine load.

Responsible for: dequantising once, and the tokenizer. It does not download, cache or check licences. Called by
`fetch.py`; slow (tens of seconds), and it needs the float32 weights twice in memory.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from paceline.models.registry import ModelError

# transformers needs these for GGUF files, and would report a missing one late.
NEEDED = ("accelerate", "gguf", "sentencepiece", "torch", "transformers")


class ConversionError(ModelError):
    """The weights could not be turned into a safetensors directory."""


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write float32 safetensors, config, generation config and tokenizer of `gguf` into the directory `out`.

    Raises:
        ConversionError: a package that the conversion needs is missing, or the file cannot be read.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConversionError(f"converting needs `pip install paceline[models]`: no {', '.join(missing)}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    was_showing = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        source = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        config = loaded.config
        # A model that came from GGUF refuses to be saved; the same weights in a fresh instance do not.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        for name in ("_model_name_or_path", "_name_or_path"):
            config.__dict__.pop(name, None)
        model = type(loaded)(config).float()
        model.load_state_dict(loaded.state_dict(), strict=True)
        model.tie_weights()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token_id = getattr(tokenizer, name)
            setattr(config, name, token_id)
            setattr(model.generation_config, name, token_id)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConversionError(f"{gguf.name} could not be converted: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
        if was_showing:
            logging.enable_progress_bar()
