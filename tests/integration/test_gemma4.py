"""A small Gemma 4 and its assistant through whole deployments, beside each other and apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.client import Completion
from paceline.embedded import Placement
from tests.integration.conftest import Site, run_site
from tests.methods.gemma4_checkpoint import FOR_GEMMA4, save_assistant, save_gemma4

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PROMPTS = ["a b c d e f g", "t9 t40 t77", "t5 t6 t7 t5 t6 t7"]
CLUSTERED = {"num_clusters": 12, "num_selected": 3}


@pytest.fixture(scope="module")
def gemma4_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_gemma4(tmp_path_factory.mktemp("gemma4"))
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(size)}, unk_token="t3"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module", params=[Placement.COLOCATED, Placement.SEPARATE])
def site(
    request: pytest.FixtureRequest, gemma4_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    assistant = save_assistant(tmp_path_factory.mktemp("assistant"), gemma4_dir, {**FOR_GEMMA4, **CLUSTERED})
    # transformers' Gemma 4 runs on the generic executor, whose 16-bit sums depend on the rows beside them.
    yield from run_site(request.param, gemma4_dir, assistant, dtype="float32")


def complete(site: Site, prompt: str, *, speculation: bool) -> Completion:
    return site.client.complete(
        prompt, max_tokens=24, temperature=0.0, ignore_eos=True, speculation=speculation
    )


def test_a_random_assistant_takes_part_and_changes_nothing(site: Site) -> None:
    plain = [complete(site, prompt, speculation=False) for prompt in PROMPTS]
    drafted = [complete(site, prompt, speculation=True) for prompt in PROMPTS]
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert not any(one.stats.num_draft_tokens for one in plain)
    assert sum(one.stats.num_draft_tokens for one in drafted) > 20
