"""Log-probabilities are cut where tokens are: random tokens in random frames give one text, tokens and values."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.contract.errors import UnavailableError
from paceline.token_bytes import TokenBytes
from paceline.v1 import generation_pb2, orchestrator_pb2, sampling_pb2
from services.gateway.checked_request import CheckedRequest
from services.gateway.detokenizer import Detokenizer
from services.gateway.generation import Generation
from services.gateway.served_model import ServedModel
from services.runtime.log_probs import cut_log_probs, join_log_probs
from tests.gateway.scripted_conductor import log_probs_of
from tests.gateway.tiny_model import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
PIECES = TokenBytes(TOKENIZER)
VOCAB_SIZE = TOKENIZER.get_vocab_size()
MODEL = ServedModel("tiny", "f", 300, 512, (1,), "", "none")
PROMPT = (5, 6, 7, 8)
OPTIONS = sampling_pb2.LogProbOptions(num_top=2, num_prompt_top=1)


def make(
    stop_texts: tuple[str, ...] = (),
    stop_token_ids: frozenset[int] = frozenset({1}),
    min_tokens: int = 0,
    options: sampling_pb2.LogProbOptions = OPTIONS,
) -> Generation:
    request = CheckedRequest(
        prompt_token_ids=PROMPT,
        sampling=sampling_pb2.SamplingParams(
            seed=9, mode=sampling_pb2.VERIFY_MODE_GREEDY, min_tokens=min_tokens
        ),
        max_new_tokens=100,
        stop_token_ids=stop_token_ids,
        stop_texts=stop_texts,
        speculation=sampling_pb2.SpeculationOptions(),
        log_probs=options,
    )
    clock = itertools.count().__next__
    return Generation(request, MODEL, Detokenizer(PIECES), lambda: float(clock()), index=3)


def frame(tokens: list[int], prompt: tuple[int, ...] = ()) -> orchestrator_pb2.RunResponse:
    return orchestrator_pb2.RunResponse(
        token_ids=tokens, log_probs=log_probs_of(tokens, 2), prompt_log_probs=log_probs_of(prompt, 1)
    )


def play(generation: Generation, frames: list[list[int]]) -> list[generation_pb2.GenerateResponse]:
    events = generation.push(frame([], PROMPT[1:]))
    for tokens in frames:
        events += generation.push(frame(tokens))
        if generation.is_finished:
            return events
    return events + generation.push(
        orchestrator_pb2.RunResponse(finish_reason=sampling_pb2.FINISH_REASON_LENGTH)
    )


def seen(
    events: list[generation_pb2.GenerateResponse],
) -> tuple[str, list[int], sampling_pb2.LogProbs, int]:
    """Text, tokens, log-probabilities and reason; in each chunk tokens and log-probabilities agree."""
    text, tokens, log_probs = "", [], sampling_pb2.LogProbs()
    for event in events:
        chunk = event.chunk
        assert event.index == 3
        assert len(chunk.log_probs.log_probs) == len(chunk.token_ids)
        text += chunk.text
        tokens += chunk.token_ids
        join_log_probs(log_probs, chunk.log_probs)
    assert events[0].prompt_log_probs.log_probs == log_probs_of(PROMPT[1:], 1)
    assert tuple(events[0].prompt_log_probs.token_ids) == PROMPT
    return text, tokens, log_probs, events[-1].finished.reason


@st.composite
def cuts(draw: st.DrawFn, num_tokens: int) -> list[slice]:
    places = sorted(draw(st.lists(st.integers(0, num_tokens), max_size=8)))
    return [slice(a, b) for a, b in zip([0, *places], [*places, num_tokens], strict=True)]


# Any tokens at all: halves of characters, special ones, ids that the tokenizer does not name.
any_tokens = st.lists(st.one_of(st.integers(0, 299), st.integers(3, VOCAB_SIZE - 1)), max_size=30)
spoken = st.text(alphabet="abhelo wä😀", max_size=20).map(lambda text: list(TOKENIZER.encode(text).ids))


@settings(deadline=None)
@given(
    st.one_of(any_tokens, spoken),
    st.lists(st.sampled_from(["lo", "o w", "ä", "😀a", "hello", "\ufffd", "zz", "a"]), max_size=3),
    st.sets(st.integers(0, 299), max_size=2),
    st.integers(0, 12),
    st.data(),
)
def test_frames_do_not_matter(
    tokens: list[int], stops: list[str], stop_ids: set[int], min_tokens: int, data: st.DataObject
) -> None:
    # A conductor sends nothing after a stop token.
    end = next((place + 1 for place, token in enumerate(tokens) if token in stop_ids), len(tokens))
    tokens = tokens[:end]
    frames = [tokens[part] for part in data.draw(cuts(len(tokens)))]

    def outcome(pieces: list[list[int]]) -> tuple[str, list[int], sampling_pb2.LogProbs, int]:
        return seen(play(make(tuple(stops), frozenset(stop_ids), min_tokens), pieces))

    text, taken, log_probs, reason = outcome([tokens])
    assert outcome(frames) == (text, taken, log_probs, reason)
    assert outcome([[token] for token in tokens]) == (text, taken, log_probs, reason)
    assert taken == tokens[: len(taken)]
    assert log_probs == log_probs_of(taken, 2) or not taken
    if len(taken) < len(tokens):
        assert reason == sampling_pb2.FINISH_REASON_STOP


def test_a_stop_text_waits_for_the_smallest_length() -> None:
    tokens = list(TOKENIZER.encode("a c b c d").ids)
    at = [place for place, token in enumerate(tokens) if TOKENIZER.id_to_token(token).endswith("c")]
    assert seen(play(make(("c",)), [tokens]))[0] == "a "
    assert seen(play(make(("c",), min_tokens=at[0]), [tokens]))[0] == "a "
    text, taken, log_probs, reason = seen(play(make(("c",), min_tokens=at[0] + 1), [tokens]))
    assert (text, reason) == ("a c b ", sampling_pb2.FINISH_REASON_STOP)
    assert taken == tokens[: at[1] + 1]
    assert log_probs == log_probs_of(taken, 2)


def test_the_prompts_come_in_parts_and_leave_as_one() -> None:
    generation = make()
    assert generation.push(frame([], PROMPT[1:2])) == []
    prompt, chunk = generation.push(frame([9], PROMPT[2:]))
    assert prompt.prompt_log_probs.log_probs == log_probs_of(PROMPT[1:], 1)
    assert list(chunk.chunk.token_ids) == [9]
    [chunk] = generation.push(frame([10]))
    assert chunk.WhichOneof("event") == "chunk"


def test_tokens_before_the_prompts_log_probs_are_the_conductors_fault() -> None:
    with pytest.raises(UnavailableError, match="log-probabilities"):
        make().push(frame([9], PROMPT[1:3]))


@pytest.mark.parametrize(
    "wrong",
    [
        sampling_pb2.LogProbs(),
        log_probs_of([9], 2),
        log_probs_of([9, 10], 1),
        sampling_pb2.LogProbs(
            log_probs=[0, 0], ranks=[1, 1], num_top=2, top_token_ids=[1, 2, 3, 300], top_log_probs=[0] * 4
        ),
        sampling_pb2.LogProbs(log_probs=[0, 0], ranks=[1], num_top=2),
    ],
)
def test_log_probs_that_do_not_fit_are_the_conductors_fault(wrong: sampling_pb2.LogProbs) -> None:
    generation = make(options=sampling_pb2.LogProbOptions(num_top=2))
    with pytest.raises(UnavailableError, match="log-probabilities"):
        generation.push(orchestrator_pb2.RunResponse(token_ids=[9, 10], log_probs=wrong))


def test_cut_and_join_are_inverse() -> None:
    whole = log_probs_of(range(10), 3)
    for at in range(11):
        joined = cut_log_probs(whole, 0, at)
        join_log_probs(joined, cut_log_probs(whole, at, 10))
        assert joined == whole
