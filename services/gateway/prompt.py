"""The token ids of a request's prompt.

Responsible for: the three forms of a prompt, and their bounds. Deliberately does not know: the rest of a request.
Called by: :mod:`services.gateway.requests`.
"""

from __future__ import annotations

from paceline.contract.errors import InvalidRequestError
from paceline.contract.fields import check_count, check_prompt
from paceline.contract.limits import MAX_MESSAGES
from paceline.v1 import generation_pb2
from services.gateway.served_model import ServedModel
from services.gateway.tokenizer import ModelTokenizer

_ROLES = ("system", "user", "assistant")


class PromptReader:
    """Turns prompts into token ids.

    Args:
        tokenizer: of the served model.
        max_bytes: longest text that is tokenised.
    """

    def __init__(self, tokenizer: ModelTokenizer, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes

    def token_ids(self, request: generation_pb2.GenerateRequest, model: ServedModel) -> tuple[int, ...]:
        """The prompt's token ids: at least one, and room for one more in the model's positions.

        Raises:
            InvalidRequestError: naming the field.
        """
        form = request.WhichOneof("prompt")
        if form is None:
            raise InvalidRequestError("prompt", "send one of text, chat and tokens")
        if form == "tokens":
            field, token_ids = "tokens.token_ids", list(request.tokens.token_ids)
        elif form == "chat":
            field, token_ids = "chat.messages", self._tokenizer.encode_chat(self._messages(request.chat))
        else:
            field = "text"
            if not request.text:
                raise InvalidRequestError(field, "must not be empty")
            self._check_size(field, len(request.text.encode()))
            token_ids = self._tokenizer.encode_text(request.text)
        if form != "tokens" and token_ids and max(token_ids) >= model.vocab_size:
            raise InvalidRequestError(field, "has a token that is outside the model's vocabulary")
        check_prompt(field, token_ids, model.vocab_size, model.max_positions)
        return tuple(token_ids)

    def _messages(self, chat: generation_pb2.ChatPrompt) -> list[dict[str, str]]:
        if not chat.messages:
            raise InvalidRequestError("chat.messages", "must not be empty")
        check_count("chat.messages", len(chat.messages), MAX_MESSAGES, "turns")
        for index, message in enumerate(chat.messages):
            if message.role not in _ROLES:
                raise InvalidRequestError(
                    f"chat.messages[{index}].role",
                    f"must be one of {', '.join(_ROLES)}, got {message.role[:40]!r}",
                )
        if not any(message.content for message in chat.messages):
            raise InvalidRequestError("chat.messages", "must have a message with content")
        self._check_size("chat.messages", sum(len(message.content.encode()) for message in chat.messages))
        return [{"role": message.role, "content": message.content} for message in chat.messages]

    def _check_size(self, field: str, num_bytes: int) -> None:
        check_count(field, num_bytes, self._max_bytes, "bytes")
