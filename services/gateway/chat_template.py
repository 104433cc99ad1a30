"""A model's chat template: from the turns of a conversation to the text that the model was trained on.

Responsible for: finding the template in a model directory and rendering it in a sandbox. Deliberately does not
know: token ids, requests, gRPC.

Called by: :mod:`services.gateway.tokenizer`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.contract.errors import InvalidRequestError, TokenizerError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class _GenerationBlock(Extension):
    """Accepts ``{% generation %}``, which marks the answer for training. It changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads a plain class attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations for one model.

    Args:
        source: the template in Jinja's language.
        named_tokens: special tokens that templates use by name, such as ``bos_token``.

    Raises:
        TokenizerError: the template does not compile.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TokenizerError(f"the chat template does not compile: {error}") from error
        self._named_tokens = dict(named_tokens)

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate | None:
        """Reads ``chat_template.jinja`` or the template in ``tokenizer_config.json``; None if there is neither."""
        config_path = model_dir / "tokenizer_config.json"
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        template_path = model_dir / "chat_template.jinja"
        source = config.get("chat_template")
        if template_path.is_file():
            source = template_path.read_text(encoding="utf-8")
        elif isinstance(source, list):  # several named templates; the others are for tools and retrieval
            source = next((t["template"] for t in source if t.get("name") == "default"), None)
        if source is None:
            return None
        return cls(source, {name: _token_text(config[name]) for name in _NAMED_TOKENS if config.get(name)})

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Renders a conversation up to the beginning of the assistant's answer.

        Raises:
            InvalidRequestError: the template rejects the conversation, for instance because roles do not
                alternate.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._named_tokens
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequestError("chat.messages", f"the chat template rejects them: {error}") from error


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _raise_template_error(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
