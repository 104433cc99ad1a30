"""Two tokenizers: which tokens they share, and the drafter's reading of the target's text."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from paceline.methods.checkpoint import CheckpointError
from paceline.methods.whole_model.draft_text import CHUNK_CHARACTERS, SameText, TranslatedText, Translation
from paceline.methods.whole_model.intersection import TokenizerFile, intersect
from paceline.token_bytes import TokenBytes
from tests.methods.foreign import TEXT, byte_fallback_tokenizer, byte_level_tokenizer, tiny_tokenizer

TARGET, OWN = byte_level_tokenizer(), byte_fallback_tokenizer()
NUM_TARGET, NUM_OWN = TARGET.get_vocab_size(), OWN.get_vocab_size()
SHARED = intersect(TARGET, OWN, NUM_TARGET, NUM_OWN)
TRANSLATION = Translation(TARGET, OWN, SHARED, NUM_OWN)
BOS = OWN.token_to_id("<s>")


def read(*commits: list[int]) -> TranslatedText:
    text = TranslatedText(TRANSLATION)
    for tokens in commits:
        text.extend(tokens)
    return text


def test_pairs_add_the_same_bytes_and_no_id_stands_twice() -> None:
    pieces, own_pieces = TokenBytes(TARGET), TokenBytes(OWN)
    plain = [
        (own, target)
        for own, target in zip(SHARED.own_ids, SHARED.target_ids, strict=True)
        if target not in pieces.special_ids
    ]
    assert len(plain) > 256  # every byte, and merges of both
    assert all(own_pieces[own] == pieces[target] != b"" for own, target in plain)
    assert len(set(SHARED.target_ids)) == len(SHARED.target_ids)
    assert list(SHARED.own_ids) == sorted(set(SHARED.own_ids))
    # Nothing that both write in the same way is left out: counted from the strings.
    written = {TARGET.decode([i], skip_special_tokens=False) for i in range(NUM_TARGET)}
    both = {OWN.decode([i], skip_special_tokens=False) for i in range(NUM_OWN)} & written - {"\ufffd"}
    assert len([target for _, target in plain if TARGET.decode([target]) in both]) == len(
        both - {"<|end|>", ""}
    )


def test_a_leading_space_is_one_whoever_writes_it() -> None:
    pairs = dict(zip(SHARED.target_ids, SHARED.own_ids, strict=True))
    ride = TARGET.token_to_id("Ġride")
    assert OWN.id_to_token(pairs[ride]) == "▁ride"
    assert OWN.id_to_token(pairs[TARGET.token_to_id("Ġ")]) == "▁"


def test_a_written_token_is_preferred_to_a_byte() -> None:
    pairs = dict(zip(SHARED.target_ids, SHARED.own_ids, strict=True))
    assert OWN.id_to_token(pairs[TARGET.token_to_id("a")]) == "a"
    assert OWN.id_to_token(pairs[TARGET.token_to_id("!")]) == "<0x21>"


def test_special_tokens_pair_by_name_alone() -> None:
    assert SHARED.special == {TARGET.token_to_id("<|end|>"): OWN.token_to_id("<|end|>")}
    assert OWN.token_to_id("<unk>") not in SHARED.own_ids


def test_ids_past_a_models_head_have_no_partner() -> None:
    cut = intersect(TARGET, OWN, 280, 300)
    assert max(cut.target_ids) < 280
    assert max(cut.own_ids) < 300


def test_tokenizers_without_a_common_token_are_refused() -> None:
    one, other = tiny_tokenizer(["a", "b"], [], "Ġ"), tiny_tokenizer(["c", "d"], [], "▁")
    with pytest.raises(CheckpointError, match="no token in common"):
        intersect(one, other, 2, 2)


def test_an_unknown_decoder_is_refused() -> None:
    other = tiny_tokenizer(["a", "b"], [], "▁")
    other.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        intersect(TARGET, other, NUM_TARGET, 2)


def test_a_tokenizer_is_another_one_where_it_maps_otherwise(tmp_path: Path) -> None:
    for name, tokenizer in (("one", TARGET), ("same", TARGET), ("other", OWN)):
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    one, same, other = (TokenizerFile.find(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other
    assert TokenizerFile.find(tmp_path) is None


def test_a_text_is_read_as_the_drafters_tokenizer_reads_it() -> None:
    text = TEXT[:200]
    assert read(TARGET.encode(text).ids).ids == OWN.encode(text).ids


def test_special_tokens_are_passed_on_or_add_nothing() -> None:
    tokens = TARGET.encode("<|user|>a rider<|end|>the wind").ids
    wanted = [BOS]
    wanted += OWN.encode("a rider", add_special_tokens=False).ids
    wanted += [OWN.token_to_id("<|end|>")]
    wanted += OWN.encode("the wind", add_special_tokens=False).ids
    assert read(tokens).ids == wanted


def test_a_token_may_change_how_the_text_before_it_is_read() -> None:
    text = TranslatedText(TRANSLATION)
    text.extend(TARGET.encode("the ri").ids)
    before = list(text.ids)
    kept = text.extend(TARGET.encode("de").ids)
    assert OWN.id_to_token(text.ids[-1]) == "▁ride"
    assert before[:kept] == text.ids[:kept]
    assert kept < len(before)
    assert before[kept] != text.ids[kept]


def test_a_text_that_ends_within_a_character_waits() -> None:
    first, second = (TARGET.token_to_id(character) for character in ("Ã", "¥"))  # å in UTF-8
    text = read([TARGET.token_to_id("a"), first])
    assert not text.is_whole
    text.extend([second])
    assert text.is_whole
    assert OWN.decode(text.ids) == "aå"


def test_before_anything_there_is_nothing_to_go_on_from() -> None:
    assert not SameText(10).is_whole
    tiny = tiny_tokenizer(["a", "b"], [], "▁")
    assert not TranslatedText(Translation(tiny, tiny, intersect(tiny, tiny, 2, 2), 2)).is_whole


def test_padding_of_the_targets_head_is_left_out() -> None:
    text = SameText(10)
    assert text.extend([3, 12, 4]) == 0
    assert text.ids == [3, 4]


@given(st.lists(st.integers(0, NUM_TARGET + 2), max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_ids_depend_on_the_tokens_and_not_on_how_they_came(tokens: list[int], cuts: list[int]) -> None:
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    text = TranslatedText(TRANSLATION)
    for begin, end in itertools.pairwise(edges):
        before = list(text.ids)
        kept = text.extend(tokens[begin:end])
        assert before[:kept] == text.ids[:kept]
        assert len(before) == kept or text.ids[kept : kept + 1] != before[kept : kept + 1]
    assert text.ids == read(tokens).ids


@pytest.mark.parametrize("text", [TEXT * 8, "ab" * 3000, "word " * 900, " ".join(TEXT) * 4])
def test_long_texts_are_read_in_chunks_with_seams_of_their_own(text: str) -> None:
    tokens = TARGET.encode(text).ids
    one_by_one = TranslatedText(TRANSLATION)
    costs = []
    for token in tokens:
        before = len(one_by_one.ids)
        kept = one_by_one.extend([token])
        costs.append(before - kept)
    assert one_by_one.ids == read(tokens).ids
    assert OWN.decode(one_by_one.ids) == text
    assert max(costs) < 2 * CHUNK_CHARACTERS


def test_a_prefix_space_that_a_tokenizer_adds_is_not_added_twice() -> None:
    from tokenizers import pre_tokenizers

    own = Tokenizer.from_str(TARGET.to_str())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    translation = Translation(TARGET, own, intersect(TARGET, own, NUM_TARGET, NUM_TARGET), NUM_TARGET)
    text = TranslatedText(translation)
    text.extend(TARGET.encode(" the wind").ids)
    assert own.decode(text.ids) == " the wind"
