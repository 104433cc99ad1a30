"""A random speculators checkpoint, and what its drafter computes, from the published names and rules alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints.conftest import NUM_DEPTHS, VOCAB, WIDTH, Case


def published_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Tensors of the format by name."""
    layer = case.layer_config
    q, kv = (layer[f"num_{x}_heads"] * layer["head_dim"] for x in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, WIDTH),
        "fc.weight": (WIDTH, 3 * WIDTH),
        "layers.0.hidden_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (case.draft_vocab, WIDTH),
    }
    for i in range(layer["num_hidden_layers"]):
        read = WIDTH if i else 2 * WIDTH
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (WIDTH,),
            f"layers.{i}.post_attention_layernorm.weight": (WIDTH,),
            f"layers.{i}.self_attn.q_proj.weight": (q, read),
            f"layers.{i}.self_attn.k_proj.weight": (kv, read),
            f"layers.{i}.self_attn.v_proj.weight": (kv, read),
            f"layers.{i}.self_attn.o_proj.weight": (WIDTH, q),
            f"layers.{i}.mlp.gate_proj.weight": (layer["intermediate_size"], WIDTH),
            f"layers.{i}.mlp.up_proj.weight": (layer["intermediate_size"], WIDTH),
            f"layers.{i}.mlp.down_proj.weight": (WIDTH, layer["intermediate_size"]),
        }
        if layer["model_type"] == "qwen3":
            shapes |= {f"layers.{i}.self_attn.{x}_norm.weight": (layer["head_dim"],) for x in "qk"}
    if case.kind == "peagle":
        shapes["mask_hidden"] = (1, 1, 3 * WIDTH)
    return shapes


def random_weights(case: Case) -> dict[str, Tensor]:
    """Random tensors of the format."""
    random = torch.Generator().manual_seed(7)
    tensors = {
        name: 1.0 + 0.2 * torch.randn(size, generator=random)
        if len(size) == 1
        else torch.randn(size, generator=random) * (1.0 if name == "mask_hidden" else size[-1] ** -0.5)
        for name, size in published_shapes(case).items()
    }
    if case.draft_vocab < VOCAB:
        tensors["d2t"] = case.draft_ids - torch.arange(case.draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, case.draft_ids, True)
    return tensors


def public_config(case: Case) -> dict[str, Any]:
    """The `config.json` of the format."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": NUM_DEPTHS, "verifier_accept_k": 1}
    return {
        "architectures": ["PEagleDraftModel" if case.kind == "peagle" else "Eagle3DraftModel"],
        "speculators_model_type": case.kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": case.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": case.layer_config,
        "draft_vocab_size": case.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        **case.flags,
    }


def write_public(directory: Path, content: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A checkpoint directory of the format."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def _frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Turns per position of each pair, float64; linear and llama3 scaling by their published formulas."""
    rate = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope["rope_type"] == "linear":
        return rate / rope["factor"]
    if rope["rope_type"] == "llama3":
        old, low, high = (
            rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        out = []
        for value in rate.tolist():
            wave = 2 * math.pi / value
            smooth = (old / wave - low) / (high - low)
            mixed = (1 - smooth) * value / rope["factor"] + smooth * value
            out.append(value if wave < old / high else value / rope["factor"] if wave > old / low else mixed)
        return torch.tensor(out, dtype=torch.float64)
    return rate


def reference_logits(case: Case, w: dict[str, Tensor], taps: Tensor, tokens: list[int]) -> Tensor:
    """As `our_logits`: everything recomputed for every row that is added."""
    features = taps @ w["fc.weight"].T
    if case.kind == "peagle":
        masks = NUM_DEPTHS - 1
        masked = w["mask_hidden"].view(1, -1) @ w["fc.weight"].T
        words = [*tokens, *[case.flags["mask_token_id"]] * masks]
        return _pass(case, w, torch.cat([features, masked.expand(masks, -1)]), words)[1]
    states, logits = _pass(case, w, features, tokens)
    _, again = _pass(case, w, torch.cat([features, states[-1:]]), [*tokens, 0])
    return torch.cat([logits, again[-1:]])


def _pass(case: Case, w: dict[str, Tensor], x: Tensor, words: list[int]) -> tuple[Tensor, Tensor]:
    """A causal pass: what the drafter goes on from, and logits."""
    layer, config, count = case.layer_config, public_config(case), len(words)
    head_dim, positions = layer["head_dim"], torch.arange(count)
    angle = positions[:, None].double() * _frequencies(layer["rope_parameters"], head_dim)
    turn_by = torch.polar(torch.ones(1, dtype=torch.float64), angle)[:, None]

    def norm(value: Tensor, name: str) -> Tensor:
        return (
            value
            * (value.square().mean(-1, keepdim=True) + layer["rms_norm_eps"]).rsqrt()
            * w[name + ".weight"]
        )

    def turn(value: Tensor) -> Tensor:
        first, second = value.double().chunk(2, dim=-1)
        turned = torch.complex(first, second) * turn_by
        return torch.cat([turned.real, turned.imag], dim=-1).float()

    embedded = w["embed_tokens.weight"][torch.tensor(words)]
    for i in range(layer["num_hidden_layers"]):
        p = f"layers.{i}."
        if i:
            read = norm(x, p + "input_layernorm")
        else:
            normed = norm(x, p + "hidden_norm")
            read = torch.cat([norm(embedded, p + "input_layernorm"), normed], dim=-1)
            x = normed if config["norm_before_residual"] else x
        q, k, v = ((read @ w[p + f"self_attn.{n}_proj.weight"].T).view(count, -1, head_dim) for n in "qkv")
        if layer["model_type"] == "qwen3":
            q, k = norm(q, p + "self_attn.q_norm"), norm(k, p + "self_attn.k_norm")
        q, k, groups = turn(q), turn(k), layer["num_attention_heads"] // layer["num_key_value_heads"]
        scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(groups, 1)) / math.sqrt(head_dim)
        scores = scores.masked_fill(positions[None, :] > positions[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", scores, v.repeat_interleave(groups, 1)).reshape(count, -1)
        x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
        m = norm(x, p + "post_attention_layernorm")
        gated = F.silu(m @ w[p + "mlp.gate_proj.weight"].T) * (m @ w[p + "mlp.up_proj.weight"].T)
        x = x + gated @ w[p + "mlp.down_proj.weight"].T
    out = norm(x, "norm")
    return (out if config["norm_output"] else x), out @ w["lm_head.weight"].T
