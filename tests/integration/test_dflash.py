"""DFlash through a whole deployment, apart: text as without drafts, blocks past the end of its positions, restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.embedded import Placement
from paceline.methods.block_diffusion.objective import DFlashShape
from paceline.models import model_fingerprint
from tests.integration.conftest import Site, run_site, until_drafted
from tests.methods import dflash_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

MAX_POSITIONS = 72
GREEDY = {"temperature": 0.0, "max_tokens": 20}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 31, "max_tokens": 20}


@pytest.fixture(scope="module")
def dflash_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: what is drafted is hardly ever right, and must change nothing."""
    config = json.loads((model_dir / "config.json").read_text())
    shape = DFlashShape(
        hidden=config["hidden_size"],
        target_hidden=config["hidden_size"],
        num_taps=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate=96,
        draft_vocab=256,
        target_vocab=config["vocab_size"],
        rope_theta=10000.0,
        rms_eps=1e-5,
        num_layers=2,
        block_size=6,
        mask_token=3,
    )
    tensors = dflash_checkpoint.random_tensors(shape, list(range(100, 356)), seed=5)
    path, fingerprint = tmp_path_factory.mktemp("dflash"), model_fingerprint(model_dir)
    return dflash_checkpoint.save(path, shape, tensors, fingerprint, [2, 15], MAX_POSITIONS)


@pytest.fixture(scope="module")
def site(model_dir: Path, dflash_dir: Path) -> Iterator[Site]:
    yield from run_site(Placement.SEPARATE, model_dir, dflash_dir)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_text_is_the_plain_one(site: Site, prompts: list[str], sampling: dict[str, Any]) -> None:
    plain = [site.complete(prompt, speculation=False, **sampling).token_ids for prompt in prompts[:4]]
    drafted = site.complete_all(prompts[:4], **sampling)
    assert [completion.token_ids for completion in drafted] == plain
    assert sum(completion.stats.num_draft_tokens for completion in drafted) > 0


def test_texts_outgrow_the_drafter_and_others_are_drafted_for(site: Site, prompts: list[str]) -> None:
    request = {**GREEDY, "max_tokens": 64}
    plain = site.complete(prompts[1], speculation=False, **request)
    drafted = site.complete(prompts[1], **request)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_prompt_tokens + len(drafted.token_ids) > MAX_POSITIONS + 20
    until_drafted(site, prompts[2], **GREEDY)


def test_a_drafter_that_restarts_drafts_again(site: Site, prompts: list[str]) -> None:
    expected = site.complete(prompts[3], speculation=False, **GREEDY).token_ids
    site.deployment.kill("drafter")
    assert site.complete(prompts[3], **GREEDY).token_ids == expected
    site.deployment.restart("drafter")
    assert until_drafted(site, prompts[3], **GREEDY).token_ids == expected
