"""Chat templates: where they are found, what they may do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.contract.errors import InvalidRequestError, TokenizerError
from services.gateway.chat_template import ChatTemplate
from services.gateway.tokenizer import ModelTokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def test_found_in_the_tokenizer_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}{{ messages[0]['content'] }}", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "<s>hi"


def test_the_default_of_several_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "yes"


def test_none_where_there_is_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


def test_what_templates_commonly_use() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}\n"
        "{%- if strftime_now('%Y')|int > 2000 %} ok{% endif %}"
    )
    assert ChatTemplate(source, {}).render(MESSAGES) == '{"role": "user", "content": "hi"} ok'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0] + 1 }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
    ],
)
def test_refusals_and_escapes_name_the_messages(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.field == "chat.messages"


def test_a_broken_template_is_found_at_start() -> None:
    with pytest.raises(TokenizerError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_unusable_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        ModelTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        ModelTokenizer.load(tmp_path)


def test_real_template(real_model_dir: Path) -> None:
    tokenizer = ModelTokenizer.load(real_model_dir)
    token_ids = tokenizer.encode_chat(MESSAGES)
    detokenizer = tokenizer.detokenizer()
    text = "".join(detokenizer.push(token_id) for token_id in token_ids)
    assert "user\nhi\nassistant\n" in text
