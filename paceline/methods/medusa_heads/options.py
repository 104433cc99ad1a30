"""Options that both Medusas share, and the heads that training starts from."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.methods.medusa_heads.heads import MAX_HEADS, MedusaShape, OutputHead
from paceline.methods.medusa_heads.training import HeadStack, fit_look_ahead, starting_parameters
from paceline.training.inputs import FIT_TOKENS, TrainingInputs
from paceline.training.options import option
from paceline.training.sizes import ModelSizes
from paceline.training.target_weights import read_embedding_and_head


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Options of Medusa's heads.

    Attributes:
        draft_vocab: tokens that the heads propose: the most frequent of the text's answers.
        num_heads: heads, one for each further token.
        output: output heads: own (one each), shared (one for all), or target (the target's).
        head_start: where own output heads begin: target (the target's rows) or linear (those after a linear look-ahead
            that is fitted first).
        step_decay: weight of one head's loss over that of the head before.
    """

    draft_vocab: int = option(7680, minimum=0)
    num_heads: int = option(5, minimum=1, maximum=MAX_HEADS)
    output: str = option("own", choices=("own", "shared", "target"))
    head_start: str = option("linear", choices=("target", "linear"))
    step_decay: float = option(0.8, above=0)


def starting_heads(options: HeadOptions, inputs: TrainingInputs, target: ModelSizes) -> HeadStack:
    """Heads on a target's last hidden state, where training begins."""
    _, head = read_embedding_and_head(inputs.model_dir)
    size = min(options.draft_vocab, target.vocab)
    draft_ids = inputs.draft_ids(target.vocab, size)
    shape = MedusaShape(
        hidden=target.hidden,
        target_vocab=target.vocab,
        draft_vocab=size,
        num_heads=options.num_heads,
        output=OutputHead(options.output),
    )
    parameters = starting_parameters(shape, head[draft_ids], inputs.seed)
    if shape.output is OutputHead.OWN and options.head_start == "linear":
        for k, ahead in enumerate(fit_look_ahead(inputs.corpus, shape.num_heads, FIT_TOKENS)):
            parameters[f"lm_heads.{k}.weight"] = parameters[f"lm_heads.{k}.weight"] @ ahead
    return HeadStack(shape, parameters, head, draft_ids, inputs.dtype)
