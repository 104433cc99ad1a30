"""Stop texts cut exactly, whatever the pieces in which the text arrives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.stop import StopTextMatcher

TEXTS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopTextMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


@given(TEXTS, STOPS, st.data())
def test_the_cut_does_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert feed(stops, pieces) == feed(stops, list(text)) == feed(stops, [text])


@settings(deadline=None)
@given(TEXTS, TEXTS, STOPS, st.data())
def test_a_stop_text_that_is_complete_too_early_is_text(
    early: str, late: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(early)), max_size=4)))
    pieces = [early[a:b] for a, b in zip([0, *cuts], [*cuts, len(early)], strict=True)]
    matcher = StopTextMatcher(stops)
    shown = "".join(matcher.push(piece, may_match=False) for piece in pieces)
    for character in late:
        shown += matcher.push(character)
        if matcher.matched is not None:
            break
    else:
        shown += matcher.flush()
    whole = early + late
    ends = [
        end
        for end in range(len(early) + 1, len(whole) + 1)
        if any(whole[:end].endswith(stop) for stop in stops)
    ]
    if not ends:
        assert (shown, matcher.matched) == (whole, None)
    else:
        longest = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len)
        assert (shown, matcher.matched) == (whole[: ends[0] - len(longest)], longest)


@given(TEXTS, STOPS)
def test_the_cut_is_before_the_stop_text_that_is_complete_first(text: str, stops: list[str]) -> None:
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    shown, matched = feed(stops, [text])
    if not ends:
        assert (shown, matched) == (text, None)
    else:
        longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert (shown, matched) == (text[: ends[0] - len(longest)], longest)


def test_holds_back_no_more_than_a_possible_start() -> None:
    matcher = StopTextMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == "Hello"
    assert matcher.push("world") == "\nworld"
    assert matcher.push("!\n\nUs") == "!"
    assert matcher.push("er story") == "\n\nUser story"
    assert matcher.push("\n\nUser:") == ""
    assert matcher.matched == "\n\nUser:"


def test_no_stop_texts_hold_nothing() -> None:
    matcher = StopTextMatcher([])
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""


def test_text_after_a_match_is_a_bug() -> None:
    matcher = StopTextMatcher(["a"])
    matcher.push("a")
    with pytest.raises(AssertionError):
        matcher.push("b")
