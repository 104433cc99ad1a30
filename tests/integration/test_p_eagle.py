"""P-EAGLE in a verifier's process: text as without drafts, drafts accepted, restarts, and texts that outgrow it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.embedded import Placement
from paceline.methods.checkpoint import DrafterConfig, load_tensors, save_drafter
from paceline.methods.eagle.fused_layer import parameter_shapes
from paceline.methods.p_eagle.drafter import p_eagle_shapes
from paceline.model.weights import SafetensorsDir
from tests.integration.conftest import Site, run_site

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

MAX_POSITIONS = 80
GREEDY = {"temperature": 0.0, "max_tokens": 24}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 77, "max_tokens": 24}


@pytest.fixture(scope="module")
def p_eagle_dir(model_dir: Path, drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped EAGLE-3 layer under an idle second one: its first token is as good, its mask rows know little."""
    config = DrafterConfig.read(drafter_dir)
    tensors = load_tensors(drafter_dir, parameter_shapes(config))
    shape = {
        **config.shape,
        "num_layers": 2,
        "num_depths": 4,
        "mask_token": 3,
        "max_positions": MAX_POSITIONS,
    }
    config = DrafterConfig("p_eagle", config.target_fingerprint, config.target_name, shape)
    random = torch.Generator().manual_seed(1)
    with SafetensorsDir(model_dir) as weights:
        tensors["embed_tokens.weight"] = weights.get("model.embed_tokens.weight", torch.bfloat16)
    for name, size in p_eagle_shapes(config).items():
        if name in tensors:
            continue
        tensors[name] = (
            torch.ones(size) if "norm" in name else torch.randn(size, generator=random) * size[-1] ** -0.5
        )
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = torch.zeros(size)
    path = tmp_path_factory.mktemp("p_eagle")
    save_drafter(path, config, {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()})
    return path


@pytest.fixture(scope="module")
def site(model_dir: Path, p_eagle_dir: Path) -> Iterator[Site]:
    yield from run_site(Placement.COLOCATED, model_dir, p_eagle_dir)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_text_is_the_plain_one_and_drafts_are_accepted(
    site: Site, prompts: list[str], sampling: dict[str, Any]
) -> None:
    plain = [site.complete(prompt, speculation=False, **sampling).token_ids for prompt in prompts[:3]]
    drafted = site.complete_all(prompts[:3], **sampling)
    assert [completion.token_ids for completion in drafted] == plain
    assert sum(completion.stats.num_accepted_tokens for completion in drafted) > 0


def test_texts_outgrow_the_drafter(site: Site, prompts: list[str]) -> None:
    request = {**GREEDY, "max_tokens": 2 * MAX_POSITIONS}
    plain = site.complete(prompts[1], speculation=False, **request)
    drafted = site.complete(prompts[1], **request)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_prompt_tokens + len(drafted.token_ids) > MAX_POSITIONS + 20
    assert 0 < drafted.stats.num_accepted_tokens < MAX_POSITIONS


def test_a_drafter_that_restarts_drafts_again(site: Site, prompts: list[str]) -> None:
    expected = site.complete(prompts[2], speculation=False, **GREEDY).token_ids
    stream = site.client.generate([{"role": "user", "content": prompts[2]}], **GREEDY)
    events = [next(stream), next(stream)]
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: list(stream))
        site.deployment.kill("verifier")
        site.deployment.restart("verifier")
        events += rest.result(timeout=120)
    assert tuple(token for event in events for token in getattr(event, "token_ids", ())) == expected
    again = site.complete(prompts[2], **GREEDY)
    assert again.token_ids == expected
    assert again.stats.num_accepted_tokens > 0
