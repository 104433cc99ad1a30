"""Random PARD checkpoints, and a slow reference of what they draft: transformers, one plain causal pass, no cache."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.methods.checkpoint import ANY_TARGET, DrafterConfig
from paceline.methods.pard.checkpoint import MODEL_CONFIG, PROJECTION, PROJECTION_BIAS, save_pard

MASK_TOKEN = 5
SCALE = 0.15  # features weigh as much as embeddings, and do not drown them


def save(
    path: Path,
    model_dir: Path,
    method: str,
    fingerprint: str = ANY_TARGET,
    target_hidden: int = 64,
    **beside: Tensor,
) -> Path:
    """A checkpoint of a saved model, for PARD-2 with a projection from two layers and the final norm, and a bias."""
    content = json.loads((model_dir / "config.json").read_text()) | {"pard_token": MASK_TOKEN}
    tensors = load_file(model_dir / "model.safetensors")
    shape: dict[str, object] = {"mask_token": MASK_TOKEN, "num_depths": 8, MODEL_CONFIG: content}
    if method == "pard2":
        random = torch.Generator().manual_seed(21)
        hidden = int(content["hidden_size"])
        tensors[PROJECTION] = torch.randn(hidden, 3 * target_hidden, generator=random) * 0.1
        tensors[PROJECTION_BIAS] = torch.randn(hidden, generator=random) * 0.1
        shape |= {
            "tap_layers": [3, 1],
            "norm_final": True,
            "target_hidden": target_hidden,
            "scale": SCALE,
            "proj_bias": True,
        }
    save_pard(path, DrafterConfig(method, fingerprint, "tiny", shape), {**tensors, **beside})
    return path


def reference_logits(
    model_dir: Path,
    tokens: list[int],
    num_depths: int,
    features: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Logits of every depth behind a text, `[num_depths, vocab]`.

    Args:
        model_dir: a transformers directory.
        tokens: `n` of them.
        num_depths: depths.
        features: `[n - 1, hidden]`, projected, of positions 0 to n - 2; None adds nothing.
        bias: of the projection.
    """
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.tensor([*tokens, *[MASK_TOKEN] * (num_depths - 1)])
    with torch.inference_mode():
        x = model.model.embed_tokens(ids)
        if features is not None:
            zero = torch.zeros(1, features.shape[1])
            shifted = torch.cat([zero, features])
            shifted = torch.cat([shifted, shifted[-1:].expand(num_depths - 1, -1)])
            x = x + SCALE * (shifted + (0.0 if bias is None else bias))
        logits: Tensor = model(inputs_embeds=x[None]).logits[0, -num_depths:]
        logits[:, MASK_TOKEN] = -torch.inf
    return logits
