"""Every key of a public `config.json` is honoured, known to be without effect, or refused by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.methods.checkpoint import CheckpointError
from paceline.methods.layouts.no_effect import NO_EFFECT
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.public_config import PublicConfig

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_keys_that_nobody_took_are_refused_with_the_way_out() -> None:
    config = PublicConfig({"hidden_size": 8, "odd": 1, "inner": {"known": 2, "strange": 3}, "unset": None})
    assert config.size("hidden_size") == 8
    assert config.section("inner").size("known") == 2
    with pytest.raises(CheckpointError, match=r"inner\.strange, odd.*--ignore inner\.strange --ignore odd"):
        config.finish()


def test_a_section_that_nobody_opened_is_refused_whole() -> None:
    with pytest.raises(CheckpointError, match="dflash_config"):
        PublicConfig({"dflash_config": {"block_size": 4}}).finish()


def test_ignored_and_ineffective_keys_pass() -> None:
    content = {"odd": 1, "inner": {"strange": 3, "use_cache": True}, "torch_dtype": "bfloat16"}
    config = PublicConfig(content, ignored=["odd", "inner.strange"])
    config.section("inner")
    config.finish()
    assert {"torch_dtype", "use_cache"} <= NO_EFFECT
    assert not {"model_type", "architectures", "tie_word_embeddings", "sliding_window"} & NO_EFFECT


def test_opening_a_section_twice_keeps_what_was_taken() -> None:
    config = PublicConfig({"inner": {"a": 1, "b": 2}})
    config.section("inner").size("a")
    config.section("inner").size("b")
    config.finish()


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("size", 0),
        ("size", True),
        ("size", "8"),
        ("size", 8.0),
        ("size", 1 << 40),
        ("count", -1),
        ("number", "1e-6"),
        ("number", float("nan")),
        ("number", float("inf")),
        ("switch", 1),
        ("switch", "true"),
        ("text", 3),
        ("sizes", [1, -1]),
        ("sizes", [True]),
        ("sizes", 3),
        ("section", [1]),
    ],
)
def test_a_value_of_another_kind_is_named(method: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: inner\.key must be"):
        getattr(PublicConfig({"key": value}, "inner."), method)("key")


def test_null_counts_as_absent() -> None:
    config = PublicConfig({"size": None, "flag": None, "list": None, "inner": None})
    assert config.size("size", 3) == 3
    assert config.switch("flag", True) is True
    assert config.sizes("list") is None
    config.section("inner").expect("x", 1)
    with pytest.raises(CheckpointError, match="size must be a positive whole number, not None"):
        config.size("size")


def test_expected_values_and_tokens() -> None:
    config = PublicConfig({"scale": 1, "act": "gelu", "flag": 1, "token": 97})
    config.expect("scale", 1.0)
    config.expect("missing", 1.0)
    with pytest.raises(
        CheckpointError, match="act must be 'silu': other values are not computed, not 'gelu'"
    ):
        config.expect("act", "silu")
    with pytest.raises(CheckpointError, match="flag must be True"):
        config.expect("flag", True)
    with pytest.raises(CheckpointError, match="token must be a token from 0 to 96, not 97"):
        config.token("token", 97)
    assert config.token("token", 98) == 97


@given(content=st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON, max_size=3))
def test_any_content_gives_a_value_or_a_message(content: dict[str, Any]) -> None:
    for method in ("size", "count", "number", "switch", "text", "sizes", "section"):
        config = PublicConfig(content)
        for key in "abc":
            with contextlib.suppress(CheckpointError):
                getattr(config, method)(key)
        config.without_effect(*"abc")
        config.unread()


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="not a JSON object"):
        PublicCheckpoint.open(tmp_path)
