"""Word for word the same in bfloat16 too, where the CPU kernels run: every placement, alone and eight together."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cpu import kernels
from tests.integration.conftest import Site

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(kernels.load() is None, reason="the CPU kernels do not run here"),
]

GREEDY = {"temperature": 0.0, "max_tokens": 32}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1234, "max_tokens": 32}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_way_gives_the_same_text(
    together: Site, apart: Site, prompts: list[str], sampling: dict[str, Any]
) -> None:
    prompts = prompts[:8]
    plain = [together.complete(prompt, speculation=False, **sampling).token_ids for prompt in prompts]
    for site in (together, apart):
        alone = [site.complete(prompt, **sampling) for prompt in prompts]
        assert [completion.token_ids for completion in alone] == plain
        assert sum(completion.stats.num_accepted_tokens for completion in alone) > 0
        company = site.complete_all(prompts, **sampling)
        assert [completion.token_ids for completion in company] == plain
