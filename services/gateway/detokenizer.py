"""From token ids to text, one token at a time, without ever retracting a character.

Responsible for: characters whose bytes are spread over several tokens. The text after n tokens depends on those
n tokens alone, not on how they arrived, so streamed text equals the text of the whole.

Deliberately does not know: stop conditions, requests, chat templates.

Called by: :mod:`services.gateway.generation`, once per generation.
"""

from __future__ import annotations

import codecs

from paceline.token_bytes import TokenBytes


class Detokenizer:
    """The text of one generation, growing token by token."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        # Invalid bytes become U+FFFD by the same rule (maximal subparts) that the tokenizers library applies.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_character, self._num_strippable = token_bytes.leading_strip

    def push(self, token_id: int) -> str:
        """Adds a token and returns the characters that it completed; empty while a character is incomplete."""
        return self._strip(self._decoder.decode(self._token_bytes[token_id]))

    def flush(self) -> str:
        """Ends the text; returns the replacement character if the last character is incomplete."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._num_strippable and text:
            if text[0] != self._strip_character:
                self._num_strippable = 0
            else:
                self._num_strippable -= 1
                text = text[1:]
        return text
