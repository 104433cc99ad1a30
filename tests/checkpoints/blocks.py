"""Random block drafters of the speculators format, and what they compute from the published rules alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.methods.block_diffusion.objective import DFlashShape
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from tests.checkpoints.conftest import MASK_TOKEN, VOCAB, WIDTH, Case
from tests.methods.dflash_checkpoint import random_tensors, reference_states

RANK = 12


@dataclass(frozen=True)
class BlockCase:
    """A block drafter.

    Attributes:
        markov: DSpark's head; empty for DFlash, which has none.
        anchor_first: whether the anchor's row proposes something.
        draft_vocab: rows of its head.
        num_layers: its layers.
        reads_token: whether the confidence head reads the token before.
        confidence: whether there is one.
    """

    markov: str = ""
    anchor_first: bool = False
    draft_vocab: int = 50
    num_layers: int = 2
    reads_token: bool = True
    confidence: bool = True

    @property
    def kind(self) -> str:
        """Its `speculators_model_type`."""
        return "dspark" if self.markov else "dflash"

    @property
    def shape(self) -> DFlashShape:
        """Its sizes."""
        return DFlashShape(
            hidden=WIDTH, target_hidden=WIDTH, num_taps=3, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=96,
            draft_vocab=self.draft_vocab, target_vocab=VOCAB, rope_theta=10000.0, rms_eps=1e-6,
            num_layers=self.num_layers, block_size=6, mask_token=MASK_TOKEN, anchor_first=self.anchor_first,
        )  # fmt: skip

    @property
    def draft_ids(self) -> list[int]:
        """Target id of each draft id."""
        ids: list[int] = Case(draft_vocab=self.draft_vocab).draft_ids.tolist()
        return ids


CASES = {
    "dflash": BlockCase(),
    "dflash-whole-vocabulary-anchor-first": BlockCase(anchor_first=True, draft_vocab=VOCAB, num_layers=1),
    "dspark": BlockCase("vanilla", anchor_first=True),
    "dspark-gated-infilling": BlockCase("gated"),
    "dspark-recurrent-whole-vocabulary": BlockCase(
        "rnn", anchor_first=True, draft_vocab=VOCAB, reads_token=False
    ),
    "dspark-unsure": BlockCase("vanilla", anchor_first=True, confidence=False),
}


def random_weights(case: BlockCase) -> dict[str, Tensor]:
    """Tensors as the format has them: a reduced vocabulary's head and maps, and never an embedding."""
    tensors = random_tensors(case.shape, case.draft_ids, seed=7)
    random = torch.Generator().manual_seed(8)
    if case.draft_vocab == VOCAB:
        del tensors["d2t"], tensors["t2d"]
    else:
        tensors["lm_head.weight"] = torch.randn(case.draft_vocab, WIDTH, generator=random)
    shapes: dict[str, tuple[int, ...]] = {}
    if case.markov:
        shapes = {
            "markov_head.markov_w1.weight": (VOCAB, RANK),
            "markov_head.markov_w2.weight": (case.draft_vocab, RANK),
        }
    if case.markov == "gated":
        shapes |= {
            "markov_head.gate_proj.weight": (RANK, WIDTH + RANK),
            "markov_head.gate_proj.bias": (RANK,),
        }
    if case.markov == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + WIDTH)}
        shapes |= {"markov_head.joint_proj.bias": (3 * RANK,)}
    if case.markov and case.confidence:
        width = WIDTH + RANK * case.reads_token
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    for name, size in shapes.items():
        scale = size[-1] ** -0.5 if "proj.weight" in name else 1.0
        tensors[name] = torch.randn(size, generator=random) * scale
    return tensors


def public_config(case: BlockCase) -> dict[str, Any]:
    """The `config.json` of the format."""
    shape = case.shape
    content: dict[str, Any] = {
        "architectures": ["DSparkDraftModel" if case.markov else "DFlashDraftModel"],
        "speculators_model_type": case.kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": case.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.num_drafts}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": WIDTH,
            "intermediate_size": 96,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": VOCAB,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "hidden_act": "silu",
        },
        "draft_vocab_size": case.draft_vocab,
        "aux_hidden_state_layer_ids": [1, 2, 4],
        "target_hidden_size": None,
        "mask_token_id": MASK_TOKEN,
        "block_size": shape.block_size,
        "sample_from_anchor": case.anchor_first,
        "sliding_window_non_causal": False,
    }
    if case.markov:
        content |= {
            "markov_rank": RANK,
            "markov_head_type": case.markov,
            "enable_confidence_head": case.confidence,
            "confidence_head_with_markov": case.reads_token,
        }
    return content


def previous_tokens(case: BlockCase, tokens: list[int], following: list[int]) -> list[int]:
    """The token before each proposal, where the text goes on with `following`."""
    return [tokens[-1], *following][: case.shape.num_drafts]


def our_block(
    directory: Path, target_dir: Path, case: BlockCase, taps: Tensor, tokens: list[int], following: list[int]
) -> tuple[Tensor, Tensor | None]:
    """What the drafter of a checkpoint of ours gives behind a text, in float32.

    Args:
        directory: the checkpoint.
        target_dir: its target.
        case: what it is.
        taps: of all tokens but the last, `[n - 1, 3 * 64]`.
        tokens: the text, `n` tokens.
        following: the text's next tokens, which Markov heads are given.

    Returns:
        Logits `[num_drafts, draft_vocab]`, and the confidences' logarithms `[num_drafts]` where there is such a head.
    """
    drafter: Any = load_drafter(directory, target_dir, dtype=torch.float32)
    assert drafter.tap is not None
    drafter.open(1, tokens)
    drafter.feed(1, 0, taps @ drafter.tap.projection.float().T)
    count = case.shape.num_drafts
    (entry,) = drafter.draft([DraftRequest(1, count)])
    assert entry is not None
    assert len(entry.tokens) == count
    block = drafter._sequences[1].round
    logits = block.logits(0, count)
    if not case.markov:
        return logits, None
    out, sure, memory = [], [], drafter._heads.memory(1)
    with torch.inference_mode():
        for depth, previous in enumerate(previous_tokens(case, tokens, following)):
            bias, confidence, memory = drafter._heads.step(block.state(depth), [previous], memory)
            out.append(logits[depth : depth + 1] + bias)
            sure += [] if confidence is None else [confidence]
    return torch.cat(out), torch.nn.functional.logsigmoid(torch.cat(sure)) if sure else None


def reference_block(
    case: BlockCase,
    w: dict[str, Tensor],
    embedding: Tensor,
    taps: Tensor,
    tokens: list[int],
    following: list[int],
) -> tuple[Tensor, Tensor | None]:
    """As `our_block`, from the published names and rules."""
    shape = replace(case.shape, rms_eps=1e-6)
    states = reference_states(shape, w, embedding, taps, tokens)
    logits = states @ w.get("lm_head.weight", embedding).T
    if not case.markov:
        return logits, None
    x = w["markov_head.markov_w1.weight"][torch.tensor(previous_tokens(case, tokens, following))]
    mixed = x
    if case.markov == "gated":
        both = torch.cat([states, x], dim=1)
        mixed = (
            torch.sigmoid(both @ w["markov_head.gate_proj.weight"].T + w["markov_head.gate_proj.bias"]) * x
        )
    if case.markov == "rnn":
        s, rows = torch.zeros(RANK), []
        for h, row in zip(states, x, strict=True):
            joined = w["markov_head.joint_proj.weight"] @ torch.cat([s, row, h])
            g, c, o = (joined + w["markov_head.joint_proj.bias"]).split(RANK)
            s = g.sigmoid() * s + (1 - g.sigmoid()) * c.tanh()
            rows.append(o.tanh())
        mixed = torch.stack(rows)
    logits = logits + mixed @ w["markov_head.markov_w2.weight"].T
    if not case.confidence:
        return logits, None
    read = torch.cat([states, x], dim=1) if case.reads_token else states
    odds = read @ w["confidence_head.proj.weight"].T + w["confidence_head.proj.bias"]
    return logits, torch.nn.functional.logsigmoid(odds).squeeze(1)
