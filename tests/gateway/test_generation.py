"""What a client sees depends on the tokens alone, not on the frames in which they came."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.contract.errors import UnavailableError
from paceline.token_bytes import TokenBytes
from paceline.v1 import generation_pb2, orchestrator_pb2, sampling_pb2
from services.gateway.checked_request import CheckedRequest
from services.gateway.detokenizer import Detokenizer
from services.gateway.generation import Generation
from services.gateway.served_model import ServedModel
from tests.gateway.tiny_model import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
PIECES = TokenBytes(TOKENIZER)
MODEL = ServedModel("tiny", "f", 300, 512, (1,), "", "none")


def make(stop_texts: tuple[str, ...] = (), stop_token_ids: frozenset[int] = frozenset({1})) -> Generation:
    request = CheckedRequest(
        prompt_token_ids=(5, 6, 7),
        sampling=sampling_pb2.SamplingParams(seed=9, mode=sampling_pb2.VERIFY_MODE_GREEDY),
        max_new_tokens=100,
        stop_token_ids=stop_token_ids,
        stop_texts=stop_texts,
        speculation=sampling_pb2.SpeculationOptions(),
    )
    clock = itertools.count().__next__
    return Generation(request, MODEL, Detokenizer(PIECES), lambda: float(clock()))


def run(
    generation: Generation, frames: list[list[int]], reason: int = sampling_pb2.FINISH_REASON_LENGTH
) -> list[generation_pb2.GenerateResponse]:
    """Feeds frames, then the end in a frame of its own, and stops where the generation does."""
    events = []
    for tokens in frames:
        events += generation.push(orchestrator_pb2.RunResponse(token_ids=tokens))
        if generation.is_finished:
            return events
    stats = generation_pb2.GenerationStats(num_target_passes=4, num_generated_tokens=99)
    return events + generation.push(orchestrator_pb2.RunResponse(finish_reason=reason, stats=stats))


def seen(events: list[generation_pb2.GenerateResponse]) -> tuple[str, list[int], int]:
    assert [event.WhichOneof("event") for event in events].count("finished") == 1
    assert events[-1].WhichOneof("event") == "finished"
    chunks = [event.chunk for event in events[:-1]]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return "".join(chunk.text for chunk in chunks), tokens, events[-1].finished.reason


@given(
    st.text(alphabet="abhelo wä😀", max_size=20),
    st.lists(st.sampled_from(["lo", "o w", "ä", "😀a", "hello", "zz"]), max_size=3),
    st.data(),
)
def test_frames_do_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    tokens = TOKENIZER.encode(text).ids
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    frames = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    one_by_one = seen(run(make(tuple(stops)), [[token] for token in tokens]))
    assert seen(run(make(tuple(stops)), frames)) == one_by_one == seen(run(make(tuple(stops)), [tokens]))
    found = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if found:
        assert one_by_one[2] == sampling_pb2.FINISH_REASON_STOP
        assert text.startswith(one_by_one[0])
        assert not any(stop in one_by_one[0] for stop in stops)
    else:
        assert one_by_one[0] == text


def test_a_stop_text_over_two_frames_is_cut_and_keeps_its_tokens() -> None:
    tokens = TOKENIZER.encode("one STOP two").ids
    generation = make(("STOP",))
    text, taken, reason = seen(run(generation, [tokens[:6], tokens[6:]]))
    assert (text, reason) == ("one ", sampling_pb2.FINISH_REASON_STOP)
    assert TOKENIZER.decode(taken) == "one STOP"


def test_a_stop_token_is_kept_and_not_shown() -> None:
    token = TOKENIZER.encode("w").ids[0]
    generation = make(stop_token_ids=frozenset({token}))
    text, taken, _ = seen(
        run(generation, [[*TOKENIZER.encode("ab").ids, token]], sampling_pb2.FINISH_REASON_STOP)
    )
    assert text == "ab"
    assert taken[-1] == token


def test_held_text_is_shown_when_the_end_comes() -> None:
    text, _, reason = seen(run(make(("lost",)), [TOKENIZER.encode("hello lo").ids]))
    assert (text, reason) == ("hello lo", sampling_pb2.FINISH_REASON_LENGTH)


def test_figures_of_a_run_that_a_stop_text_ended_are_the_gateways_own() -> None:
    generation = make(("c",))
    events = run(generation, [TOKENIZER.encode("a").ids, TOKENIZER.encode("bcd").ids])
    stats = events[-1].finished.stats
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_target_passes) == (3, 3, 2)
    assert stats.time_to_first_token_us > 0


def test_figures_of_the_conductor_are_passed_on_with_the_true_number_of_tokens() -> None:
    generation = make()
    stats = run(generation, [[5, 6]])[-1].finished.stats
    assert (stats.num_generated_tokens, stats.num_target_passes) == (2, 4)


def test_a_token_outside_the_vocabulary_is_the_conductors_fault() -> None:
    with pytest.raises(UnavailableError, match="300"):
        make().push(orchestrator_pb2.RunResponse(token_ids=[300]))
