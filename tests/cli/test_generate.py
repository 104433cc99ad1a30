"""`paceline generate` against a real gateway with a scripted orchestrator behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.stats import comparison_line, stats_line
from paceline.client import Completion, Finished, Stats
from paceline.client.events import from_response
from paceline.v1 import generation_pb2, sampling_pb2
from tests.gateway.scripted_conductor import Script
from tests.gateway.server_thread import Serve
from tests.gateway.tiny_model import byte_level_tokenizer

TEXT = "hello wörld 😀"
TOKENS = byte_level_tokenizer().encode(TEXT).ids


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["generate", *arguments])
    return int(caught.value.code or 0)


def test_text_then_figures(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(Script(TOKENS, frame_sizes=(2,)))
    assert run("hello", "--endpoint", served.endpoint) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == TEXT
    assert "tokens per target pass" in lines[1]
    assert "acceptance by position 1.00" in lines[1]
    assert "(length)" in lines[1]
    assert len(lines) == 2


def test_quiet_prints_the_text_alone(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(Script(TOKENS))
    assert run("hello", "--quiet", "--endpoint", served.endpoint) == 0
    assert capsys.readouterr().out == TEXT + "\n"


def test_parameters_reach_the_gateway(serve: Serve) -> None:
    served = serve(Script(TOKENS))
    flags = ["-n", "9", "-t", "0.5", "--top-k", "3", "--top-p", "0.5", "--min-p", "0.1", "--seed", "4"]
    assert (
        run("hello", "--raw", *flags, "--no-speculation", "--ignore-eos", "--endpoint", served.endpoint) == 0
    )
    sent = served.conductor.runs[0]
    assert list(sent.prompt_token_ids) == byte_level_tokenizer().encode("hello").ids
    assert (sent.max_new_tokens, sent.sampling.seed, sent.sampling.top_k) == (9, 4, 3)
    assert (sent.speculation.disabled, list(sent.stop_token_ids)) == (True, [])


def test_sampling_parameters_reach_the_gateway(serve: Serve) -> None:
    served = serve(Script(TOKENS))
    flags = ["--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5"]
    flags += ["--logit-bias", "7=-100", "--logit-bias", "9=1.5", "--bad-word", "wo", "--bad-word", "lo"]
    flags += ["--min-tokens", "2", "--stop-token-id", "8", "--stop-token-id", "9", "--logprobs", "2"]
    assert run("hello", *flags, "--endpoint", served.endpoint) == 0
    sent = served.conductor.runs[0]
    sampling = sent.sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.5,
        0.5,
        -0.5,
    )
    assert (dict(sampling.logit_bias), sampling.min_tokens) == ({7: -100.0, 9: 1.5}, 2)
    assert len(sampling.bad_runs) == 4
    assert (list(sent.stop_token_ids), sent.log_probs.num_top) == ([1, 8, 9], 2)


def test_log_probs_are_a_line_for_each_token(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(Script(TOKENS))
    assert run("hello", "--logprobs", "1", "--endpoint", served.endpoint) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == TEXT
    assert len(lines) == 1 + len(TOKENS) + 1
    token = TOKENS[0]
    assert lines[1].split() == [
        "token",
        str(token),
        "log-prob",
        f"{-token:.4f}",
        "rank",
        str(token + 1),
        f"{token}:-0.0000",
    ]


def test_several_completions_are_printed_one_by_one(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(Script(TOKENS))
    assert run("hello", "--n", "3", "--seed", "5", "-t", "1", "--endpoint", served.endpoint) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line for line in lines if line.startswith("choice")) == [
        f"choice {index}, seed {5 + index}:" for index in range(3)
    ]
    assert lines.count(TEXT) == 3
    assert run("hello", "--n", "2", "--quiet", "--endpoint", served.endpoint) == 0
    assert capsys.readouterr().out.splitlines() == [TEXT, TEXT]


@pytest.mark.parametrize("form", ["json_schema", "grammar"])
def test_a_constraint_is_read_from_a_file_or_taken_as_it_is(serve: Serve, tmp_path: Path, form: str) -> None:
    text = {"json_schema": '{"type": "boolean"}', "grammar": 'start: "a" | "b"'}[form]
    path = tmp_path / "constraint.txt"
    path.write_text(text)
    served = serve(Script(TOKENS))
    for value in (text, str(path)):
        assert run("hello", f"--{form.replace('_', '-')}", value, "--endpoint", served.endpoint) == 0
    assert [getattr(sent.sampling.constraint, form) for sent in served.conductor.runs] == [text, text]


def test_constraints_reach_the_gateway(serve: Serve) -> None:
    served = serve(Script(TOKENS))
    for flags in (["--regex", "[ab]+"], ["--choice", "yes", "--choice", "no"], ["--json-object"]):
        assert run("hello", *flags, "--endpoint", served.endpoint) == 0
    sent = [each.sampling.constraint for each in served.conductor.runs]
    assert sent[0].regex == "[ab]+"
    assert list(sent[1].choice.texts) == ["yes", "no"]
    assert sent[2].json_object


def test_a_chat_has_a_system_turn_where_given(serve: Serve) -> None:
    served = serve(Script(TOKENS))
    assert run("hello", "--system", "be brief", "--endpoint", served.endpoint) == 0
    prompt = byte_level_tokenizer().decode(
        served.conductor.runs[0].prompt_token_ids, skip_special_tokens=False
    )
    assert prompt.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello")


def test_compare_decodes_plainly_with_the_same_seed(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(Script(TOKENS))
    assert run("hello", "-t", "0.9", "--compare", "--endpoint", served.endpoint) == 0
    out = capsys.readouterr().out
    assert "plain decoding: " in out
    assert "1.00 times plain; the texts are identical, token for token" in out
    *_, speculative, plain = served.conductor.runs
    assert (speculative.speculation.disabled, plain.speculation.disabled) == (False, True)
    assert speculative.sampling.seed == plain.sampling.seed


def test_a_mode_is_asked_for_by_name(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(Script(TOKENS))
    for mode, is_exact in (("block", True), ("typical", False)):
        assert run("hello", "-t", "0.5", "--mode", mode, "--endpoint", served.endpoint) == 0
        sent = served.conductor.runs[-1].sampling
        assert sent.mode == sampling_pb2.VerifyMode.Value(f"VERIFY_MODE_{mode.upper()}")
        assert ("not exact" in capsys.readouterr().err) is not is_exact


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["-t", "-1"], "sampling.temperature"),
        (["-n", "0"], "max_tokens"),
        (["--stop", ""], "stop[0].text"),
        (["--regex", "("], "sampling.constraint.regex"),
        (["--json-object", "--choice", "yes"], "sampling.constraint"),
        (["--mode", "best"], "sampling.mode"),
        (["--logit-bias", "7"], "sampling.logit_bias"),
        (["--logit-bias", "7=x"], "sampling.logit_bias"),
        (["--logit-bias", "7=1", "--logit-bias", "7=2"], "sampling.logit_bias"),
        (["--logit-bias", "300=1"], "sampling.logit_bias[300]"),
        (["--bad-word", ""], "bad_words[0]"),
        (["--logprobs", "21"], "log_probs.num_top"),
        (["--n", "17"], "n"),
        (["--n", "2", "--compare"], "n"),
    ],
)
def test_bad_input_names_the_field(
    serve: Serve, capsys: pytest.CaptureFixture[str], flags: list[str], field: str
) -> None:
    served = serve(Script(TOKENS))
    assert run("hello", *flags, "--endpoint", served.endpoint) == 2
    assert capsys.readouterr().err.startswith(f"paceline: {field}: ")


def test_an_endpoint_without_a_gateway_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hello", "--timeout-s", "1", "--endpoint", "127.0.0.1:9") == 1
    assert "paceline: " in capsys.readouterr().err


def stats(**fields) -> Stats:
    values = {
        "num_prompt_tokens": 5,
        "num_generated_tokens": 41,
        "num_target_passes": 20,
        "num_draft_tokens": 60,
        "num_accepted_tokens": 21,
        "drafted_per_position": (20, 20),
        "accepted_per_position": (15, 6),
        "time_to_first_token_s": 0.25,
        "decode_s": 0.5,
    }
    return Stats(**{**values, **fields})


def test_figures() -> None:
    assert stats_line(stats(), "stop") == (
        "80.0 tokens/s | 2.05 tokens per target pass | acceptance by position 0.75 0.30 | first token 250 ms"
        " | 41 tokens (stop)"
    )
    single = stats(num_generated_tokens=1, num_target_passes=1, decode_s=0.0, drafted_per_position=())
    assert "acceptance" not in stats_line(single, "length")


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("request", "the request turned them off"),
        ("policy", "`paceline policy`"),
        ("missing", "no drafter had this text"),
        ("late", "came too late"),
        ("", ""),
    ],
)
def test_a_line_without_drafts_says_why(reason: str, text: str) -> None:
    none = {"num_draft_tokens": 0, "num_accepted_tokens": 0, "drafted_per_position": ()}
    line = stats_line(stats(**none, no_draft_reason=reason), "stop")
    assert text in line
    assert ("no drafts" in line) == bool(reason)


def test_the_reason_for_no_drafts_is_read_off_the_wire() -> None:
    for name, value in generation_pb2.NoDraftReason.items():
        message = generation_pb2.GenerationStats(no_draft_reason=value)
        finished = generation_pb2.GenerateResponse(finished=generation_pb2.GenerationFinished(stats=message))
        event = from_response(finished)
        assert isinstance(event, Finished)
        word = name.removeprefix("NO_DRAFT_REASON_").lower()
        assert event.stats.no_draft_reason == ("" if word == "unspecified" else word)


def test_a_difference_is_located() -> None:
    def completion(tokens: tuple[int, ...], decode_s: float) -> Completion:
        return Completion("", tokens, "length", stats(decode_s=decode_s), "id", "tiny", 1)

    line = comparison_line(completion((1, 2, 3), 0.5), completion((1, 2, 4), 1.0))
    assert line.startswith("2.00 times plain; the texts differ from token 3 on")
    assert "differ from token 4 on" in comparison_line(completion((1, 2, 3), 1), completion((1, 2, 3, 4), 1))
