"""Log-probabilities are the model's own, as transformers computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.client import Completion
from tests.integration.conftest import Site

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_TOKENS = 24
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95, "seed": 1234, "repetition_penalty": 1.4, "top_k": 10},
]


def test_log_probs_are_the_models_own(together: Site, prompts: list[str], model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for parameters in SAMPLING:
        stream = together.client.generate(
            [{"role": "user", "content": prompts[1]}],
            max_tokens=NUM_TOKENS,
            log_probs=5,
            prompt_log_probs=2,
            **parameters,
        )
        events = list(stream)
        completion = Completion.from_events(events)
        prompt = next(event.token_ids for event in events if type(event).__name__ == "PromptLogProbs")
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
        expected = logits.log_softmax(-1)
        entries = [*completion.prompt_log_probs, *completion.log_probs]
        assert len(entries) == len(prompt) - 1 + NUM_TOKENS
        for place, entry in enumerate(entries):
            row = expected[place]
            assert entry.log_prob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
            num_top = 2 if place < len(prompt) - 1 else 5
            assert [value for _, value in entry.top] == pytest.approx(
                row.topk(num_top).values.tolist(), abs=1e-3
            )
            assert abs(entry.rank - 1 - int((row > row[entry.token_id]).sum())) <= 2  # near ties
