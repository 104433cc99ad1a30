"""Every bad input is refused with the name of its field; good input gets every default."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from google.protobuf import text_format

from paceline.contract.errors import InvalidRequestError
from paceline.v1 import generation_pb2, sampling_pb2
from services.gateway.requests import RequestChecker, check_num_choices
from services.gateway.served_model import ServedModel
from services.gateway.tokenizer import ModelTokenizer
from tests.gateway.tiny_model import byte_fallback_tokenizer

MODEL = ServedModel(
    name="tiny",
    fingerprint="f",
    vocab_size=300,
    max_positions=64,
    eos_token_ids=(1,),
    method="",
    placement="none",
)


def request(fields: str = "", prompt: str = 'text: "hello"') -> generation_pb2.GenerateRequest:
    return text_format.Parse(f"{prompt} {fields}", generation_pb2.GenerateRequest())


@pytest.fixture
def checker(tokenizer: ModelTokenizer) -> RequestChecker:
    return RequestChecker(tokenizer, max_prompt_bytes=1000)


BAD_FIELDS = [
    ('model: "another"', "model"),
    ('tenant: "two words"', "tenant"),
    (f'tenant: "{"x" * 65}"', "tenant"),
    ('tenant: "a/b"', "tenant"),
    ("sampling { temperature: -1 }", "sampling.temperature"),
    ("sampling { temperature: nan }", "sampling.temperature"),
    ("sampling { temperature: inf }", "sampling.temperature"),
    ("sampling { temperature: 100.5 }", "sampling.temperature"),
    ("sampling { top_k: 301 }", "sampling.top_k"),
    ("sampling { top_k: 4294967295 }", "sampling.top_k"),
    ("sampling { top_p: 0 }", "sampling.top_p"),
    ("sampling { top_p: 1.01 }", "sampling.top_p"),
    ("sampling { top_p: -0.5 }", "sampling.top_p"),
    ("sampling { top_p: nan }", "sampling.top_p"),
    ("sampling { min_p: -0.1 }", "sampling.min_p"),
    ("sampling { min_p: 1.1 }", "sampling.min_p"),
    ("sampling { min_p: nan }", "sampling.min_p"),
    ("sampling { mode: VERIFY_MODE_GREEDY temperature: 0.5 }", "sampling.mode"),
    ("sampling { mode: VERIFY_MODE_COUPLED }", "sampling.mode"),
    ("sampling { mode: VERIFY_MODE_REJECTION temperature: 0 }", "sampling.mode"),
    ("sampling { mode: VERIFY_MODE_TYPICAL temperature: 0 }", "sampling.mode"),
    ("sampling { typical_epsilon: 0 }", "sampling.typical_epsilon"),
    ("sampling { typical_delta: 1.5 }", "sampling.typical_delta"),
    ("sampling { typical_delta: nan }", "sampling.typical_delta"),
    ("sampling { repetition_penalty: 0 }", "sampling.repetition_penalty"),
    ("sampling { repetition_penalty: 10.5 }", "sampling.repetition_penalty"),
    ("sampling { repetition_penalty: nan }", "sampling.repetition_penalty"),
    ("sampling { presence_penalty: 2.1 }", "sampling.presence_penalty"),
    ("sampling { presence_penalty: inf }", "sampling.presence_penalty"),
    ("sampling { frequency_penalty: -2.1 }", "sampling.frequency_penalty"),
    ("sampling { frequency_penalty: nan }", "sampling.frequency_penalty"),
    ("sampling { logit_bias { key: 300 value: 1 } }", "sampling.logit_bias[300]"),
    ("sampling { logit_bias { key: 4294967295 value: 1 } }", "sampling.logit_bias[4294967295]"),
    ("sampling { logit_bias { key: 7 value: 100.5 } }", "sampling.logit_bias[7]"),
    ("sampling { logit_bias { key: 7 value: nan } }", "sampling.logit_bias[7]"),
    ("sampling { bad_runs { } }", "sampling.bad_runs[0].token_ids"),
    (
        "sampling { bad_runs { token_ids: 1 } bad_runs { token_ids: 1 token_ids: 300 } }",
        "sampling.bad_runs[1].token_ids[1]",
    ),
    ("sampling { bad_runs { " + "token_ids: 1 " * 33 + "} }", "sampling.bad_runs[0].token_ids"),
    ("sampling { " + "bad_runs { token_ids: 1 } " * 257 + "}", "sampling.bad_runs"),
    ("sampling { " + "bad_runs { token_ids: 1 } " * 256 + '} bad_words: "x"', "bad_words"),
    ("sampling { min_tokens: 10 } max_tokens: 9", "sampling.min_tokens"),
    ("sampling { typical_epsilon: 1.5 }", "sampling.typical_epsilon"),
    ('bad_words: "x" bad_words: ""', "bad_words[1]"),
    (f'bad_words: "{"x" * 257}"', "bad_words[0]"),
    (f'bad_words: "{"x" * 33}"', "bad_words[0]"),  # more tokens than a run may have
    ('bad_words: "x" ' * 65, "bad_words"),
    ("log_probs { num_top: 21 }", "log_probs.num_top"),
    ("log_probs { num_prompt_top: 4294967295 }", "log_probs.num_prompt_top"),
    ("max_tokens: 0", "max_tokens"),
    ("max_tokens: 65", "max_tokens"),
    ("max_tokens: 1000000000", "max_tokens"),
    ("stop { }", "stop[0].type"),
    ('stop { type: STOP_TYPE_TEXT text: "x" } stop { text: "y" }', "stop[1].type"),
    ("stop { type: STOP_TYPE_TEXT }", "stop[0].text"),
    (f'stop {{ type: STOP_TYPE_TEXT text: "{"x" * 257}" }}', "stop[0].text"),
    (f'stop {{ type: STOP_TYPE_TEXT text: "{"ä" * 129}" }}', "stop[0].text"),
    ('stop { type: STOP_TYPE_TEXT text: "x" token_id: 3 }', "stop[0].token_id"),
    ('stop { type: STOP_TYPE_TOKEN token_id: 3 text: "x" }', "stop[0].text"),
    ("stop { type: STOP_TYPE_TOKEN token_id: 300 }", "stop[0].token_id"),
    ('stop { type: STOP_TYPE_TEXT text: "x" } ' * 9, "stop"),
    ("speculation { max_draft_tokens: 0 }", "speculation.max_draft_tokens"),
    ("speculation { max_draft_tokens: 65 }", "speculation.max_draft_tokens"),
    (f'speculation {{ drafter: "{"x" * 257}" }}', "speculation.drafter"),
    ("stream_interval: 0", "stream_interval"),
    ("stream_interval: 1025", "stream_interval"),
]
BAD_PROMPTS = [
    ("", "prompt"),
    ('text: ""', "text"),
    (f'text: "{"x" * 64}"', "text"),
    (f'text: "{"x" * 1001}"', "text"),
    ("chat { }", "chat.messages"),
    ('chat { messages { role: "user" } }', "chat.messages"),
    ('chat { messages { role: "wizard" content: "x" } }', "chat.messages[0].role"),
    ('chat { messages { role: "user" content: "x" } messages { content: "x" } }', "chat.messages[1].role"),
    (
        'chat { messages { role: "user" content: "x" } messages { role: "system" content: "x" } }',
        "chat.messages",
    ),
    (f'chat {{ messages {{ role: "user" content: "{"x" * 60}" }} }}', "chat.messages"),
    (f'chat {{ messages {{ role: "user" content: "{"x" * 1001}" }} }}', "chat.messages"),
    ("tokens { }", "tokens.token_ids"),
    ("tokens { token_ids: 5 token_ids: 300 }", "tokens.token_ids[1]"),
    ("tokens { token_ids: 4294967295 }", "tokens.token_ids[0]"),
    ("tokens { " + "token_ids: 5 " * 64 + "}", "tokens.token_ids"),
]


@pytest.mark.parametrize(("fields", "field"), BAD_FIELDS)
def test_bad_field_is_named(checker: RequestChecker, fields: str, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checker.check(request(fields), MODEL)
    assert caught.value.field == field


@pytest.mark.parametrize(("prompt", "field"), BAD_PROMPTS)
def test_bad_prompt_is_named(checker: RequestChecker, prompt: str, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checker.check(request(prompt=prompt), MODEL)
    assert caught.value.field == field


@pytest.mark.parametrize("number", [6, 99, -1])
def test_unknown_enum_numbers_are_named(checker: RequestChecker, number: int) -> None:
    unknown_mode = request()
    unknown_mode.sampling.MergeFromString(
        sampling_pb2.SamplingParams(temperature=1.0).SerializeToString() + b"\x30" + _varint(number)
    )
    with pytest.raises(InvalidRequestError, match=r"sampling\.mode"):
        checker.check(unknown_mode, MODEL)
    unknown_stop = request()
    unknown_stop.stop.add().MergeFromString(b"\x08" + _varint(number))
    with pytest.raises(InvalidRequestError, match=r"stop\[0\]\.type"):
        checker.check(unknown_stop, MODEL)


def _varint(number: int) -> bytes:
    number %= 1 << 64
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def test_defaults(checker: RequestChecker, tokenizer: ModelTokenizer) -> None:
    checked = checker.check(request(), MODEL)
    assert list(checked.prompt_token_ids) == tokenizer.encode_text("hello")
    assert checked.max_new_tokens == 64 - len(
        checked.prompt_token_ids
    )  # 128 end at the model's last position
    assert checked.stop_token_ids == {1}
    assert checked.sampling.mode == sampling_pb2.VERIFY_MODE_GREEDY
    assert (checked.sampling.temperature, checked.sampling.top_p, checked.sampling.top_k) == (0.0, 1.0, 0)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert checked.sampling.HasField(name)


def test_seed_is_kept_or_drawn(checker: RequestChecker) -> None:
    largest = 2**64 - 1
    assert checker.check(request(f"sampling {{ seed: {largest} }}"), MODEL).sampling.seed == largest
    assert checker.check(request("sampling { seed: 0 }"), MODEL).sampling.seed == 0
    drawn = {checker.check(request("sampling { temperature: 1 }"), MODEL).sampling.seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(seed < 2**53 for seed in drawn)


def test_mode_above_zero_temperature_is_coupled(checker: RequestChecker) -> None:
    checked = checker.check(request("sampling { temperature: 0.7 top_p: 0.9 top_k: 300 min_p: 1 }"), MODEL)
    assert checked.sampling.mode == sampling_pb2.VERIFY_MODE_COUPLED
    assert math.isclose(checked.sampling.top_p, 0.9)


def test_stop_conditions_are_sorted(checker: RequestChecker) -> None:
    fields = 'stop { type: STOP_TYPE_TOKEN token_id: 7 } stop { type: STOP_TYPE_TEXT text: "end" } ignore_eos: true'
    checked = checker.check(request(fields), MODEL)
    assert checked.stop_token_ids == {7}
    assert checked.stop_texts == ("end",)


def test_a_resumed_run_carries_the_tokens_so_far(checker: RequestChecker) -> None:
    checked = checker.check(request("max_tokens: 9"), MODEL)
    run = checked.to_run_request("id", [5, 6])
    assert list(run.prompt_token_ids) == [*checked.prompt_token_ids, 5, 6]
    assert (run.num_resumed_tokens, run.max_new_tokens) == (2, 9)


def test_rules_and_log_probs_reach_the_conductor(checker: RequestChecker) -> None:
    fields = (
        "sampling { repetition_penalty: 1.5 presence_penalty: 0.5 frequency_penalty: -0.5 min_tokens: 3"
        " logit_bias { key: 9 value: -100 } bad_runs { token_ids: 8 token_ids: 9 } }"
        " log_probs { num_top: 0 num_prompt_top: 2 }"
    )
    checked = checker.check(request(fields), MODEL)
    run = checked.to_run_request("id")
    sampling = run.sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.5,
        0.5,
        -0.5,
    )
    assert (sampling.min_tokens, dict(sampling.logit_bias)) == (3, {9: -100.0})
    assert [list(run.token_ids) for run in sampling.bad_runs] == [[8, 9]]
    assert run.log_probs == sampling_pb2.LogProbOptions(num_top=0, num_prompt_top=2)
    # What came before the first token is not asked for again.
    assert checked.to_run_request("id", [5]).log_probs == sampling_pb2.LogProbOptions(num_top=0)


def test_bad_words_become_runs_at_the_start_and_after_a_space(
    checker: RequestChecker, tokenizer: ModelTokenizer
) -> None:
    words = 'bad_words: "hello" bad_words: " wo" bad_words: " " bad_words: "hello"'
    checked = checker.check(request(f"sampling {{ bad_runs {{ token_ids: 8 }} }} {words}"), MODEL)
    runs = [list(run.token_ids) for run in checked.sampling.bad_runs]
    texts = ["hello", " hello", "wo", " wo", " "]
    assert runs == [[8], *(tokenizer.encode_part(text) for text in texts)]


def test_a_choice_has_its_own_seed_and_no_prompt_log_probs(checker: RequestChecker) -> None:
    checked = checker.check(
        request(f"sampling {{ seed: {2**64 - 2} }} log_probs {{ num_top: 1 num_prompt_top: 1 }}"), MODEL
    )
    choices = [checked.choice(index) for index in range(4)]
    assert [choice.sampling.seed for choice in choices] == [2**64 - 2, 2**64 - 1, 0, 1]
    assert [choice.log_probs.HasField("num_prompt_top") for choice in choices] == [True, False, False, False]
    assert all(choice.log_probs.num_top == 1 for choice in choices)


@pytest.mark.parametrize("number", [0, 17, 2**32 - 1])
def test_a_bad_number_of_choices_is_named(number: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_num_choices(request(f"n: {number}"))
    assert caught.value.field == "n"
    assert check_num_choices(request()) == 1
    assert check_num_choices(request("n: 16")) == 16


def test_the_gateway_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import services.gateway.__main__"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_chat_is_rendered_with_the_template(checker: RequestChecker, tokenizer: ModelTokenizer) -> None:
    checked = checker.check(request(prompt='chat { messages { role: "user" content: "hello" } }'), MODEL)
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert list(checked.prompt_token_ids) == tokenizer.encode_text(rendered)
    assert checked.prompt_token_ids[0] == 0


def test_a_model_without_a_template_refuses_chat() -> None:
    checker = RequestChecker(ModelTokenizer(byte_fallback_tokenizer(), None), 1000)
    with pytest.raises(InvalidRequestError) as caught:
        checker.check(request(prompt='chat { messages { role: "user" content: "a" } }'), MODEL)
    assert caught.value.field == "chat"


def test_a_tokenizer_larger_than_the_model_cannot_send_tokens_past_it(checker: RequestChecker) -> None:
    small = ServedModel("tiny", "f", 4, 64, (1,), "", "none")
    with pytest.raises(InvalidRequestError, match="outside the model's vocabulary"):
        checker.check(request(), small)


def test_a_tenant_comes_from_the_field_or_else_from_beside_the_request(checker: RequestChecker) -> None:
    assert checker.check(request('tenant: "acme-1.eu_x"'), MODEL, "other").tenant == "acme-1.eu_x"
    assert checker.check(request(), MODEL, "other").to_run_request("id").tenant == "other"
    assert checker.check(request(), MODEL).tenant == ""
    with pytest.raises(InvalidRequestError) as caught:
        checker.check(request(), MODEL, "no spaces")
    assert caught.value.field == "x-tenant"
