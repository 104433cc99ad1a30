"""The served model's tokenizer, loaded from its directory without torch or transformers.

Responsible for: text and conversations to token ids, and detokenizers for the reverse. Deliberately does not
know: limits and validation of requests, gRPC.

Called by: :mod:`services.gateway.prompt` (prompts) and :mod:`services.gateway.servicer` (detokenizers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from paceline.contract.errors import InvalidRequestError, TokenizerError
from paceline.token_bytes import TokenBytes
from services.gateway.chat_template import ChatTemplate
from services.gateway.detokenizer import Detokenizer


class ModelTokenizer:
    """Encodes prompts and makes detokenizers for one model."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._token_bytes = TokenBytes(tokenizer)

    @classmethod
    def load(cls, model_dir: Path) -> ModelTokenizer:
        """Loads ``tokenizer.json`` and the chat template.

        Raises:
            TokenizerError: there is no usable ``tokenizer.json``.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"no tokenizer.json in {model_dir}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every unreadable file
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        return cls(tokenizer, ChatTemplate.load(model_dir))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds to whole texts."""
        return list(self._tokenizer.encode(text).ids)

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a piece of text, without added special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation; the template contains all special tokens.

        Raises:
            InvalidRequestError: the model has no chat template, or the template rejects the conversation.
        """
        if self._chat_template is None:
            raise InvalidRequestError("chat", "this model has no chat template; send text or tokens")
        rendered = self._chat_template.render(messages)
        return list(self._tokenizer.encode(rendered, add_special_tokens=False).ids)

    def detokenizer(self) -> Detokenizer:
        """A detokenizer for one generation."""
        return Detokenizer(self._token_bytes)
