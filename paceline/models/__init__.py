"""Real models without a hub: a registry, fetching with conversion, look-up and fingerprints.

Importing this package imports neither torch nor transformers.
"""

from paceline.models.cache import NotFetchedError, cache_dir, cached, resolve
from paceline.models.end_tokens import end_tokens
from paceline.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from paceline.models.registry import DEFAULT_MODEL, MODELS, UnknownModelError
from paceline.models.tokenizer_files import copy_tokenizer

__all__ = [
    "DEFAULT_MODEL",
    "MODELS",
    "NotFetchedError",
    "UnknownModelError",
    "cache_dir",
    "cached",
    "copy_tokenizer",
    "end_tokens",
    "model_fingerprint",
    "resolve",
    "tokenizer_fingerprint",
]
