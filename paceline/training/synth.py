"""``paceline data synth``: conversations that a chat model writes itself, a user turn and the answer to it.

Responsible for the run and its folder; `conversations.py` writes a shard and has the options. Knows no drafter.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from paceline.contract.errors import TrainingDataError
from paceline.training.conversations import ConversationBatch, SynthOptions
from paceline.training.options import check_options
from paceline.training.shards import Shard
from paceline.training.teacher import Teacher
from paceline.training.template import TurnTemplate
from paceline.training.text_folder import write_missing_shards


def run(options: SynthOptions) -> dict[str, int]:
    """Writes the shards that are not there yet.

    Returns:
        Counts over the whole folder: ``shards``, ``conversations``, ``tokens``, ``answer_tokens``.

    Raises:
        TrainingDataError: an option does not fit, or the teacher cannot run the target.
    """
    check_options(options)
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    tokenizer = Tokenizer.from_file(str(options.model_dir / "tokenizer.json"))
    template = TurnTemplate.load(options.model_dir, tokenizer)
    needed = len(template.header) + options.max_user_tokens + len(template.switch)
    if needed >= options.max_tokens:
        raise TrainingDataError(
            f"max_tokens {options.max_tokens} leaves no room for an answer: template and user turn take {needed}"
        )
    teacher = Teacher(options.model_dir, options.torch_dtype)

    @torch.inference_mode()
    def write(index: int) -> Shard:
        return ConversationBatch(teacher, template, tokenizer, options, index).write()

    return write_missing_shards(options, "synth", "paceline-synth", write)
