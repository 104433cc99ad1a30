"""The `config.json` of a public checkpoint, every key of which is accounted for.

A key that a reader drops in silence may change what the drafter computes. So a reader takes keys one by one, and
`finish` refuses, by name, those that nobody took and that are not known to be without effect (`no_effect.py`).
`paceline.checkpoints` calls `finish` after every reader. Values are checked where they are taken: null is how
transformers writes "not set", and counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from paceline.methods.checkpoint import CheckpointError
from paceline.methods.layouts.no_effect import NO_EFFECT

T = TypeVar("T")

MAX_SIZE = 1 << 31
"""No size, count or token id of a model is as large; a larger one is a damaged file."""


class PublicConfig:
    """A JSON object of a `config.json`: the whole file, or an object within it.

    Deliberately no mapping: `{**config}` would take all keys unread.

    Args:
        content: the object.
        path: what precedes a key in messages, such as `dflash_config.`.
        ignored: full names of keys that the user declares to be without effect.
    """

    def __init__(self, content: Mapping[str, Any], path: str = "", ignored: Collection[str] = ()) -> None:
        self._content = dict(content)
        self._path = path
        self._ignored = frozenset(ignored)
        self._taken: set[str] = set()
        self._sections: dict[str, PublicConfig] = {}

    def __contains__(self, name: str) -> bool:
        """Whether a key has a value other than null. Does not take the key."""
        return self._content.get(name) is not None

    def name(self, key: str) -> str:
        """A key's full name, for messages."""
        return self._path + key

    def peek(self, key: str) -> Any:
        """A value as it stands in the file, or None. Does not take the key: for recognising a layout."""
        return self._content.get(key)

    def take(self, key: str) -> Any:
        """A value as it stands in the file, or None, for a reader that checks it by itself."""
        self._taken.add(key)
        return self._content.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number.

        Raises:
            CheckpointError: it is not, or is absent and has no default.
        """
        return self._checked(key, default, _is_size, "must be a positive whole number")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 0.

        Raises:
            CheckpointError: it is not, or is absent and has no default.
        """
        return self._checked(
            key, default, lambda value: value == 0 or _is_size(value), "must be a whole number"
        )

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            CheckpointError: it is not, or is absent and has no default.
        """
        return float(self._checked(key, default, _is_number, "must be a finite number"))

    def switch(self, key: str, default: bool = False) -> bool:
        """True or false.

        Raises:
            CheckpointError: it is neither.
        """
        return self._checked(key, default, lambda value: isinstance(value, bool), "must be true or false")

    def text(self, key: str, default: str | None = None) -> str:
        """A text.

        Raises:
            CheckpointError: it is not, or is absent and has no default.
        """
        return self._checked(key, default, lambda value: isinstance(value, str), "must be a text")

    def sizes(self, key: str) -> list[int] | None:
        """A list of whole numbers from 0, such as ids of layers; None if absent.

        Raises:
            CheckpointError: it is no such list.
        """
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(item == 0 or _is_size(item) for item in value):
            raise self.error(key, "must be a list of whole numbers")
        if any(isinstance(item, bool) for item in value):
            raise self.error(key, "must be a list of whole numbers")
        return list(value)

    def token(self, key: str, vocab: int) -> int | None:
        """The id of a token; None if absent.

        Raises:
            CheckpointError: it is no id of a vocabulary of `vocab` tokens.
        """
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
            raise self.error(key, f"must be a token from 0 to {vocab - 1}")
        return value

    def expect(self, key: str, *allowed: object, because: str = "other values are not computed") -> None:
        """Take a key that is supported at some values only; absent and null always are.

        Raises:
            CheckpointError: it has another value; the message says `because`.
        """
        value = self.take(key)
        if value is None or any(value == other and type(value) is type(other) for other in allowed):
            return
        if _is_number(value) and any(_is_number(other) and value == other for other in allowed):
            return  # 1 and 1.0
        known = " or ".join(map(repr, allowed)) or "absent"
        raise self.error(key, f"must be {known}: {because}")

    def section(self, key: str) -> PublicConfig:
        """An object within this one; an empty one if absent. Its keys are accounted for like this one's.

        Raises:
            CheckpointError: it is not an object.
        """
        if key not in self._sections:
            value = self.take(key)
            if value is not None and not isinstance(value, Mapping):
                raise self.error(key, "must be an object")
            self._sections[key] = PublicConfig(value or {}, self.name(key) + ".", self._ignored)
        return self._sections[key]

    def without_effect(self, *keys: str) -> None:
        """Take keys that change nothing in this layout, though they may elsewhere."""
        self._taken.update(keys)

    def unchecked(self) -> dict[str, Any]:
        """All keys at once, taken. For readers that do not account for their keys yet."""
        self._taken.update(self._content)
        return dict(self._content)

    def error(self, key: str, says: str) -> CheckpointError:
        """An error about a key, which quotes its value."""
        value = repr(self._content.get(key))
        shown = value if len(value) <= 80 else value[:77] + "..."
        return CheckpointError(f"config.json: {self.name(key)} {says}, not {shown}")

    def unread(self) -> list[str]:
        """Full names of the keys that nobody took, that have a value, and that are not known to be without effect."""
        names = [
            self.name(key)
            for key, value in self._content.items()
            if key not in self._taken and value is not None and key not in NO_EFFECT
        ]
        names = [name for name in names if name not in self._ignored]
        return names + [name for section in self._sections.values() for name in section.unread()]

    def finish(self) -> None:
        """Refuse keys that nobody took.

        Raises:
            CheckpointError: naming all of them, and the way out.
        """
        if unread := sorted(self.unread()):
            raise CheckpointError(
                f"config.json: no reader of this format knows {', '.join(unread)}, which may change what the drafter "
                f"computes. If you know that it does not, add {' '.join(f'--ignore {name}' for name in unread)}"
            )

    def _checked(self, key: str, default: T | None, fits: Callable[[Any], bool], says: str) -> T:
        value = self.take(key)
        if value is None:
            value = default
        if value is None or not fits(value):
            raise self.error(key, says)
        found: T = value
        return found


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < MAX_SIZE


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
