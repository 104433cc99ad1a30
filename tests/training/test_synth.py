"""Target-written text: deterministic, resumable, segmented, and with the features that belong to its tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from paceline.contract.errors import TrainingDataError
from paceline.training import shards
from paceline.training.prompts import draw_ask
from paceline.training.synth import run
from paceline.training.teacher import Teacher
from paceline.training.template import TurnTemplate
from tests.training.conftest import synth_options


def _conversations(shard: shards.Shard) -> list[slice]:
    bounds = shard.offsets.tolist()
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def test_template_is_found_by_rendering(target_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(target_dir / "tokenizer.json"))
    template = TurnTemplate.load(target_dir, tokenizer)
    assert tokenizer.decode(list(template.header), skip_special_tokens=False) == "<|im_start|>user\n"
    after = tokenizer.decode(list(template.switch), skip_special_tokens=False)
    assert after == "<|im_end|>\n<|im_start|>assistant\n"
    assert template.end_of_turn == 2


def test_conversations_follow_the_template(target_dir: Path, text_dir: Path) -> None:
    template = TurnTemplate.load(target_dir, Tokenizer.from_file(str(target_dir / "tokenizer.json")))
    shard = shards.read_shard(shards.shard_path(text_dir, 0))
    assert shard.num_conversations == 16
    for span in _conversations(shard):
        tokens, segments = shard.tokens[span].tolist(), shard.segments[span].tolist()
        header, switch = list(template.header), list(template.switch)
        assert tokens[: len(header)] == header
        end = tokens.index(template.end_of_turn)
        assert tokens[end : end + len(switch)] == switch
        assert segments[len(header) : end + 1] == [shards.SEGMENT_USER] * (end + 1 - len(header))
        first = end + len(switch)
        assert segments[end + 1 : first] == [shards.SEGMENT_TEMPLATE] * (len(switch) - 1)
        assert segments[first:] == [shards.SEGMENT_ANSWER] * (len(tokens) - first)
        assert len(tokens) <= 72
        assert template.end_of_turn not in tokens[first:-1]  # nothing follows a closed answer


def test_asks_are_given_whole(target_dir: Path, tmp_path: Path) -> None:
    run(
        synth_options(
            target_dir, tmp_path, seed=1, num_shards=1, ask_fraction=1.0, max_user_tokens=40, max_tokens=96
        )
    )
    shard = shards.read_shard(shards.shard_path(tmp_path, 0))
    tokenizer = Tokenizer.from_file(str(target_dir / "tokenizer.json"))
    draws = torch.Generator().manual_seed(0)
    known = {draw_ask(draws) for _ in range(60_000)}
    assert len(known) > 3000
    asks = {tuple(tokenizer.encode(ask, add_special_tokens=False).ids[:39]) for ask in known}
    for span in _conversations(shard):
        user = shard.tokens[span][shard.segments[span] == shards.SEGMENT_USER].tolist()
        assert tuple(user[:-1]) in asks


def test_greedy_answers_are_the_targets_choice(text_dir: Path) -> None:
    shard = shards.read_shard(shards.shard_path(text_dir, 0))
    assert 0 < int(shard.is_greedy.sum()) < 16
    for i, span in enumerate(_conversations(shard)):
        chosen = shard.segments[span][1:] == shards.SEGMENT_ANSWER
        agrees = shard.tokens[span][1:][chosen] == shard.top_tokens[span][:-1][chosen]
        if shard.is_greedy[i]:
            assert bool(agrees.all())


def test_features_belong_to_their_tokens(target_dir: Path, text_dir: Path) -> None:
    teacher = Teacher(target_dir, torch.float32)
    shard = shards.read_shard(shards.shard_path(text_dir, 1))
    assert shard.taps is not None
    assert shard.hidden is not None
    for span in _conversations(shard)[:4]:
        tokens = shard.tokens[span].long()[None]
        with torch.inference_mode():
            hidden, taps = teacher.forward(tokens, teacher.new_cache(1, 72))
        torch.testing.assert_close(shard.hidden[span].float(), hidden[0], atol=0.05, rtol=0.02)
        torch.testing.assert_close(shard.taps[span].float(), taps[0].flatten(1), atol=0.05, rtol=0.02)


def test_same_seed_same_text_and_finished_shards_are_kept(
    target_dir: Path, text_dir: Path, tmp_path: Path
) -> None:
    options = synth_options(target_dir, tmp_path, seed=1, first_shard=1, num_shards=1)
    counts = run(options)
    again = shards.read_shard(shards.shard_path(tmp_path, 1))
    first = shards.read_shard(shards.shard_path(text_dir, 1))
    assert torch.equal(again.tokens, first.tokens)
    assert counts["tokens"] == first.tokens.numel()
    written = shards.shard_path(tmp_path, 1).stat().st_mtime_ns
    assert run(options) == counts
    assert shards.shard_path(tmp_path, 1).stat().st_mtime_ns == written
    other = shards.read_shard(shards.shard_path(text_dir, 0))
    assert other.tokens.numel() != first.tokens.numel() or not torch.equal(other.tokens, first.tokens)


def test_manifest_says_how_it_was_made(target_dir: Path, text_dir: Path) -> None:
    from paceline.models import model_fingerprint

    manifest = shards.read_manifest(text_dir)
    assert manifest["model_fingerprint"] == model_fingerprint(target_dir)
    assert manifest["settings"]["seed"] == 1
    assert manifest["counts"]["shards"] == 2
    assert manifest["counts"]["conversations"] == 32
    assert 0 < manifest["counts"]["answer_tokens"] < manifest["counts"]["tokens"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("rows", 0), ("top_p", 1.5), ("answer_temperature", 0.0), ("dtype", "int8"), ("max_user_tokens", 70)],
)
def test_bad_options_are_named(target_dir: Path, tmp_path: Path, field: str, value: object) -> None:
    options = replace(synth_options(target_dir, tmp_path), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(TrainingDataError, match="max_tokens" if field == "max_user_tokens" else field):
        run(options)


def test_damaged_shard_is_refused(text_dir: Path, tmp_path: Path) -> None:
    path = shards.shard_path(tmp_path, 0)
    path.write_bytes(shards.shard_path(text_dir, 0).read_bytes()[:-100])
    with pytest.raises(TrainingDataError, match="shard-00000"):
        shards.read_shard(path)
    good = shards.read_shard(shards.shard_path(text_dir, 0))
    short = replace(good, offsets=good.offsets[:-1])
    shards.write_shard(path, short)
    with pytest.raises(TrainingDataError, match="disagree"):
        shards.read_shard(path)
