"""The target's own texts, which a dialled drafter knows beforehand.

Responsible for: making them by plain greedy decoding on the real engine, their file, and finding the text of a prompt.
Deliberately does not know: luck, drafts. Made by experiments, read by experiments.dials.drafter.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.atomic_write import write_json
from paceline.contract.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ScriptText:
    """A prompt and what the target goes on with.

    Attributes:
        prompt: token ids.
        continuation: token ids, greedy.
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Both, one after the other."""
        return self.prompt + self.continuation


@dataclass(frozen=True, slots=True)
class Script:
    """Texts of one target.

    Attributes:
        vocab_size: of the target.
    """

    texts: tuple[ScriptText, ...]
    vocab_size: int

    def find(self, tokens: Sequence[int]) -> int | None:
        """Which text begins with these tokens, a whole prompt at least; None where none does."""
        given = tuple(tokens)
        for index, text in enumerate(self.texts):
            if len(given) >= len(text.prompt) and text.tokens[: len(given)] == given:
                return index
        return None

    def write(self, path: Path) -> None:
        """Writes the file that `read` reads."""
        texts = [{"prompt": text.prompt, "continuation": text.continuation} for text in self.texts]
        write_json(path, {"vocab_size": self.vocab_size, "texts": texts}, indent=None)

    @classmethod
    def read(cls, path: Path) -> Script:
        """Reads a script.

        Raises:
            InvalidRequestError: it is not one, or a token is outside the vocabulary.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            vocab_size = int(content["vocab_size"])
            texts = tuple(
                ScriptText(tuple(map(int, text["prompt"])), tuple(map(int, text["continuation"])))
                for text in content["texts"]
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequestError("script", f"{path.name} is not a script: {error!r}") from None
        if not texts or any(not 0 <= token < vocab_size for text in texts for token in text.tokens):
            raise InvalidRequestError("script", f"{path.name} has no texts, or tokens outside the vocabulary")
        return cls(texts, vocab_size)


def random_prompts(count: int, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens; the first few ids, where special tokens are, are left out."""
    chooser = random.Random(seed)
    return [[chooser.randrange(8, vocab_size) for _ in range(num_tokens)] for _ in range(count)]


def make_script(model_dir: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> Script:
    """What the target says, by plain decoding in float32 on one thread, all texts together.

    Args:
        model_dir: the target.
        prompts: token ids.
        num_tokens: length of each continuation.
    """
    import torch

    from experiments.equality.decoding import decode
    from paceline.sampling.params import SamplingParams
    from paceline.target import TargetEngine

    engine = TargetEngine.load(model_dir, dtype=torch.float32, num_threads=1)
    decoded = decode(engine, prompts, [SamplingParams(temperature=0.0)] * len(prompts), num_tokens)
    texts = [
        ScriptText(tuple(prompt), tuple(text.tokens)) for prompt, text in zip(prompts, decoded, strict=True)
    ]
    return Script(tuple(texts), engine.shape.vocab_size)
