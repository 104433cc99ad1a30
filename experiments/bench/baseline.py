"""`transformers.generate` on the same weights, dtype and threads: the yardstick that readers know."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from experiments.bench.sample import Sample


class TransformersBaseline:
    """Greedy generation at batch 1, in this process."""

    def __init__(self, model_dir: Path, dtype: str, num_threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(num_threads)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=getattr(torch, dtype), local_files_only=True
        ).eval()

    def generate(self, text: str, max_tokens: int) -> Sample:
        """One chat turn, greedily, to the end token or `max_tokens`."""
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        inputs = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        arrivals: list[float] = []

        class Clock(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                arrivals.append(time.perf_counter())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                **inputs,
                max_new_tokens=max_tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([Clock()]),
            )
        elapsed = time.perf_counter() - started
        tokens = tuple(output[0, inputs["input_ids"].shape[1] :].tolist())
        return Sample(tokens, elapsed, arrivals[0] - started, len(tokens))
