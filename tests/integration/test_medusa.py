"""Medusa heads in a whole deployment: the text is the target's own, drafter restarted or not.

The heads know the prompts' own continuations by heart, so that drafts are accepted without any training.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.client import Completion
from paceline.embedded import Placement
from paceline.target import SequenceRows, TargetEngine
from tests.integration.conftest import Site, fast_dtype, run_site, until_drafted
from tests.memorised import memorise

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NUM_PROMPTS = 4
NUM_TOKENS = 20
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1234, "max_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def texts(model_dir: Path, prompts: list[str]) -> list[list[int]]:
    """The first prompts and what the target alone says to them, greedily."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    engine = TargetEngine.load(model_dir, dtype=getattr(torch, fast_dtype()))
    found = []
    for prompt in prompts[:NUM_PROMPTS]:
        turn = [{"role": "user", "content": prompt}]
        rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        text = list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
        slot, fresh = engine.open(), text
        for _ in range(NUM_TOKENS):
            (logits,) = engine.step([SequenceRows(slot, fresh, num_logits="last")]).logits
            fresh = [int(logits[-1].argmax())]
            text = text + fresh
        engine.close(slot)
        found.append(text)
    return found


@pytest.fixture(scope="module")
def medusa_dir(model_dir: Path, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that have learned those texts."""
    starts = [len(text) - NUM_TOKENS for text in texts]
    dtype = getattr(torch, fast_dtype())
    return memorise(tmp_path_factory.mktemp("medusa1"), model_dir, texts, starts, dtype=dtype)


def assert_ngram(site: Site, prompts: list[str], texts: list[list[int]]) -> None:
    """With heads and without them, greedy and sampled."""
    own = prompts[:NUM_PROMPTS]
    greedy = site.complete_all(own, **GREEDY)
    for completion, text in zip(greedy, texts, strict=True):
        tokens = completion.token_ids
        assert list(tokens) == text[len(text) - NUM_TOKENS :][: len(tokens)]
    # Drafts of four: what was learned is accepted, and rounds are few.
    accepted = sum(completion.stats.num_accepted_tokens for completion in greedy)
    assert accepted > NUM_PROMPTS * NUM_TOKENS // 3
    plain, sampled = (
        [completion.token_ids for completion in site.complete_all(own, speculation=speculation, **SAMPLED)]
        for speculation in (False, True)
    )
    assert sampled == plain


def test_separate_and_restarted(
    model_dir: Path, medusa_dir: Path, prompts: list[str], texts: list[list[int]]
) -> None:
    for site in run_site(Placement.SEPARATE, model_dir, medusa_dir):
        assert_ngram(site, prompts, texts)
        stream = site.client.generate([{"role": "user", "content": prompts[0]}], **GREEDY)
        events = [next(stream), next(stream)]  # started, and the first tokens
        site.deployment.kill("drafter")
        tokens = Completion.from_events([*events, *stream]).token_ids
        assert list(tokens) == texts[0][-NUM_TOKENS:][: len(tokens)]
        site.deployment.restart("drafter")
        again = until_drafted(site, prompts[1], **GREEDY)
        assert list(again.token_ids) == texts[1][-NUM_TOKENS:][: len(again.token_ids)]
        assert again.stats.num_accepted_tokens > 0
