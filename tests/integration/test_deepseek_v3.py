"""A small DeepSeek-V3 and its own prediction module through whole deployments, beside each other and apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DeepseekV3ForCausalLM

from paceline.checkpoints.exchange import import_checkpoint
from paceline.client import Completion
from paceline.embedded import Placement
from tests.integration.conftest import Site, run_site
from tests.methods.deepseek_reference import public_module, publish, save_target

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PROMPTS = ["t5 t9 t17 t3", "t40 t41", " ".join(f"t{token}" for token in range(10, 50))]
LENGTH = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target, and its module as imported from the files of both."""
    path = tmp_path_factory.mktemp("deepseek")
    config = save_target(path / "target")
    words = {f"t{token}": token for token in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    tokenizer.save(str(path / "target" / "tokenizer.json"))
    public = publish(path / "public", path / "target", config, [public_module(config)[1]])
    import_checkpoint(public, path / "target", path / "module")
    return path / "target", path / "module"


@pytest.fixture(scope="module", params=[Placement.COLOCATED, Placement.SEPARATE])
def site(
    request: pytest.FixtureRequest, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    # It runs on the generic executor, whose 16-bit sums depend on the rows beside them.
    yield from run_site(request.param, *folders, dtype="float32")


def complete(site: Site, prompt: str, *, speculation: bool) -> Completion:
    return site.client.complete(
        prompt, max_tokens=LENGTH, temperature=0.0, ignore_eos=True, speculation=speculation
    )


def test_the_text_is_that_of_transformers_with_and_without_the_module(
    site: Site, folders: tuple[Path, Path]
) -> None:
    model = DeepseekV3ForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    for prompt in PROMPTS:
        ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
        found = model.generate(ids, max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1, pad_token_id=0)[
            0, ids.shape[1] :
        ].tolist()
        assert list(complete(site, prompt, speculation=False).token_ids) == found
        drafted = complete(site, prompt, speculation=True)
        assert list(drafted.token_ids) == found
        assert drafted.stats.num_draft_tokens > 0
        # The second time the prompt is found in the prefix cache.
        assert list(complete(site, prompt, speculation=True).token_ids) == found
