"""Options of a block drafter's training, and what its objective is built from."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import structlog
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.methods.block_diffusion.objective import DFlashShape
from paceline.methods.block_diffusion.start import tap_scale
from paceline.methods.eagle.fused_start import default_shape
from paceline.training.draft_vocabulary import rarest_token
from paceline.training.inputs import TrainingInputs
from paceline.training.objective import TargetReference
from paceline.training.options import option
from paceline.training.sizes import ModelSizes, default_tap_layers
from paceline.training.target_weights import read_embedding_and_head

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """Options of a block drafter.

    Attributes:
        draft_vocab: tokens that the drafter proposes: the most frequent of the text's answers; 0 for all.
        num_layers: layers of the drafter.
        block_size: rows of a block, the last committed token's included.
        block_layout: infilling (a row proposes the token at its own position), anchor_first (the one behind it) or
            published (what the method's authors take).
        num_anchors: most blocks of a text and step.
        block_decay: places behind a block's first over which a proposal's weight falls by e.
    """

    draft_vocab: int = option(7680, minimum=0)
    num_layers: int = option(4, minimum=1)
    block_size: int = option(8, minimum=1)
    block_layout: str = option("published", choices=("published", "infilling", "anchor_first"))
    num_anchors: int = option(64, minimum=1)
    block_decay: float = option(4.0, above=0)


@dataclass(frozen=True, slots=True)
class BlockParts:
    """What both block objectives are built from, beside their parameters.

    Attributes:
        shape: sizes of the block.
        embedding: the target's `[vocab, hidden]`.
        head: the target's `[vocab, hidden]`.
        draft_ids: target id of every draft id, int64 `[draft_vocab]`.
        tap_scale: root mean square of every entry of the taps, float32 `[taps_width]`.
        target: what an exported checkpoint says of its target.
    """

    shape: DFlashShape
    embedding: Tensor
    head: Tensor
    draft_ids: Tensor
    tap_scale: Tensor
    target: TargetReference


def block_parts(options: BlockOptions, inputs: TrainingInputs, published: str) -> BlockParts:
    """The block that the options describe; `published` is the layout that the method's authors take.

    Raises:
        TrainingDataError: the block has no row that proposes a token.
    """
    target = ModelSizes.read(inputs.model_dir)
    embedding, head = read_embedding_and_head(inputs.model_dir)
    taps = default_tap_layers(target.num_layers)
    size = options.draft_vocab or target.vocab
    draft_ids = inputs.draft_ids(target.vocab, size)
    layout = published if options.block_layout == "published" else options.block_layout
    shape = DFlashShape(
        **asdict(default_shape(target, len(taps), size, None)),
        num_layers=options.num_layers,
        block_size=options.block_size,
        mask_token=rarest_token(inputs.corpus.count_answer_tokens(target.vocab), embedding),
        anchor_first=layout == "anchor_first",
    )
    if not shape.num_drafts:
        raise TrainingDataError("block_size 1 leaves nothing to draft")
    log.info("block", mask_token=shape.mask_token, layout=layout)
    return BlockParts(
        shape,
        embedding,
        head,
        draft_ids,
        tap_scale(inputs.corpus),
        inputs.reference(target.max_positions, taps),
    )
