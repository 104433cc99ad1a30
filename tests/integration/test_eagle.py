"""EAGLE-2 in a whole deployment: the text is the target's own, with trees, also where the drafter starts again.

EAGLE-1 has the same layer and tap; both are served within one process in `tests/experiments/test_equality.py`.

The layer knows the prompts' own continuations by heart, so that drafts are accepted without any training: `fc` is the
map that takes each of their tokens and the feature before it to the token's own feature, and the rest adds nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.client import Completion
from paceline.embedded import Placement
from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.eagle.feature_layer import parameter_shapes
from paceline.models import model_fingerprint
from paceline.target import SequenceRows, TapSpec, TargetEngine
from tests.integration.conftest import Site, fast_dtype, run_site

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NUM_PROMPTS = 4
NUM_TOKENS = 20
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1234, "max_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def learned(model_dir: Path, prompts: list[str]) -> list[tuple[list[int], torch.Tensor]]:
    """The first prompts with what the target alone says to them greedily, and the features of both."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    dtype = getattr(torch, fast_dtype())
    engine = TargetEngine.load(model_dir, dtype=dtype, taps=[TapSpec(norm_final=True)])
    found = []
    for prompt in prompts[:NUM_PROMPTS]:
        turn = [{"role": "user", "content": prompt}]
        rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        text = list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
        slot, fresh, features = engine.open(), text, []
        for _ in range(NUM_TOKENS + 6):
            output = engine.step([SequenceRows(slot, fresh, num_logits="last")])
            features.append(output.features[0].float())
            fresh = [int(output.logits[0][-1].argmax())]
            text = text + fresh
        engine.close(slot)
        found.append((text, torch.cat(features)))
    return found


@pytest.fixture(scope="module")
def eagle_dir(
    model_dir: Path,
    learned: list[tuple[list[int], torch.Tensor]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A checkpoint that has learned those texts."""
    engine_config = json.loads((model_dir / "config.json").read_text())
    width = engine_config["hidden_size"]
    shape = {
        "hidden": width,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 32,
        "intermediate": 64,
        "target_vocab": engine_config["vocab_size"],
        "max_positions": 2048,
    }
    config = DrafterConfig("eagle2", model_fingerprint(model_dir), "learned", shape)
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.zeros(size)
        for name, size in parameter_shapes(config).items()
    }
    from paceline.methods.target_vocabulary import read_vocabulary

    embedding, _ = read_vocabulary(model_dir, engine_config["vocab_size"], width, torch.float32)
    before, after = [], []
    for text, features in learned:
        rows = features.shape[0] - 1  # features of all tokens but the last
        before.append(torch.cat([embedding[torch.tensor(text[1 : rows + 1])], features[:-1]], dim=1))
        after.append(features[1:])
    inputs, wanted = torch.cat(before).double(), torch.cat(after).double()
    tensors["fc.weight"] = torch.linalg.lstsq(inputs, wanted, driver="gelsd").solution.T.float().contiguous()
    path = tmp_path_factory.mktemp("eagle2")
    save_drafter(path, config, tensors)
    return path


def assert_ngram(site: Site, prompts: list[str], learned: list[tuple[list[int], torch.Tensor]]) -> None:
    """With drafts and without them, greedy and sampled."""
    own = prompts[:NUM_PROMPTS]
    greedy = site.complete_all(own, **GREEDY)
    for completion, (text, _) in zip(greedy, learned, strict=True):
        tokens = list(completion.token_ids)
        assert tokens == text[len(text) - NUM_TOKENS - 6 :][: len(tokens)]
    accepted = sum(completion.stats.num_accepted_tokens for completion in greedy)
    assert accepted > NUM_PROMPTS * NUM_TOKENS // 3
    plain, sampled = (
        [completion.token_ids for completion in site.complete_all(own, speculation=speculation, **SAMPLED)]
        for speculation in (False, True)
    )
    assert sampled == plain


def test_separate_and_restarted(
    model_dir: Path, eagle_dir: Path, prompts: list[str], learned: list[tuple[list[int], torch.Tensor]]
) -> None:
    for site in run_site(Placement.SEPARATE, model_dir, eagle_dir):
        assert_ngram(site, prompts, learned)
        site.deployment.kill("drafter")
        text = list(site.complete(prompts[0], **GREEDY).token_ids)
        assert text == learned[0][0][len(learned[0][0]) - NUM_TOKENS - 6 :][: len(text)]
        site.deployment.restart("drafter")
        again: Completion | None = None
        for _ in range(100):
            again = site.complete(prompts[0], **GREEDY)
            if again.stats.num_accepted_tokens:
                break
        assert again is not None
        assert again.stats.num_accepted_tokens > 0
        assert list(again.token_ids) == text
