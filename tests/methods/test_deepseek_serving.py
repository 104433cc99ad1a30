"""A DeepSeek-V3 and its own module in one process: the text is transformers' own, with and without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from experiments.equality.decoding import DraftShape, decode
from paceline.checkpoints.exchange import import_checkpoint
from paceline.methods.loading import load_drafter
from paceline.sampling.params import SamplingParams
from paceline.target import PrefixCache, SequenceRows, TargetEngine
from tests.methods.deepseek_reference import VARIANTS, public_module, publish, save_target

PROMPTS = [[5, 9, 17, 3], [40, 41], list(range(10, 43))]
LENGTH = 24


@pytest.mark.parametrize("name", ["experts in groups", "no latent of queries", "yarn", "wide values"])
def test_the_text_is_that_of_transformers_with_any_drafts(name: str, tmp_path: Path) -> None:
    config = save_target(tmp_path / "target", **VARIANTS[name])
    module = public_module(config)[1]
    import_checkpoint(
        publish(tmp_path / "public", tmp_path / "target", config, [module]),
        tmp_path / "target",
        tmp_path / "own",
    )
    model = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    expected = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        expected.append(ids[0, len(prompt) :].tolist())
    drafter = load_drafter(tmp_path / "own", tmp_path / "target", dtype=torch.float32)
    assert drafter.tap is not None
    engine = TargetEngine.load(tmp_path / "target", dtype=torch.float32, taps=[drafter.tap])
    greedy = [SamplingParams(temperature=0.0)] * len(PROMPTS)
    assert [text.tokens for text in decode(engine, PROMPTS, greedy, LENGTH)] == expected
    for shape in (DraftShape(1, 1), DraftShape(4, 4), DraftShape(4, 10)):
        drafted = decode(engine, PROMPTS, greedy, LENGTH, drafter, shape)
        assert [text.tokens for text in drafted] == expected
    sampled = [SamplingParams(temperature=0.9, seed=seed) for seed in range(len(PROMPTS))]
    alone = [
        decode(engine, [prompt], [one], LENGTH)[0].tokens
        for prompt, one in zip(PROMPTS, sampled, strict=True)
    ]
    drafted = decode(engine, PROMPTS, sampled, LENGTH, drafter, DraftShape(4, 10))
    assert [text.tokens for text in drafted] == alone
    assert engine.cache.num_slots == 0


def test_a_kept_prefix_goes_on_as_the_whole_text(tmp_path: Path) -> None:
    save_target(tmp_path)
    engine = TargetEngine.load(tmp_path, dtype=torch.float32)
    text = [7 * place % 61 for place in range(40)]
    cache = PrefixCache(engine, 1 << 20)
    slot = engine.open(len(text))
    engine.step([SequenceRows(slot, text, num_logits="none")])
    cache.keep(slot, text, None)
    found = cache.find([*text, 3, 4], len(text) + 1, needs_features=False)
    assert found is not None
    again = engine.step([SequenceRows(cache.take(found[0]), [3, 4], num_logits="last")]).logits[0]
    whole = engine.step([SequenceRows(engine.open(), [*text, 3, 4], num_logits="last")]).logits[0]
    torch.testing.assert_close(again, whole, rtol=1e-5, atol=1e-5)
