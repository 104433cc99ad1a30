"""DeepSeek-V3's block in torch operators: latent attention and experts equal transformers' layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from paceline.draft_layer import Rows
from paceline.draft_layer.torch_layer import SlotAttention
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.decoder_block import block_shape, block_shapes, read_block, rope_table
from paceline.methods.routed_experts import read_experts
from paceline.model.block import BlockShape
from paceline.model.device import Device
from paceline.model.experts import ExpertsShape
from paceline.model.torch_block import TorchBlock
from paceline.model.torch_experts import TorchExperts
from paceline.target.kv.cache import KVCache
from paceline.target.kv.slot import KVLayout
from tests.methods.deepseek_reference import (
    VARIANTS,
    checkpoint_shape,
    decoder_layer,
    deepseek_config,
    layer_tensors,
    run_layer,
)

CPU = Device("cpu")


def run_ours(
    config: DrafterConfig, tensors: dict[str, Tensor], passes: list[Rows], states: list[Tensor]
) -> Tensor:
    weights = read_block(config, tensors, "", torch.float32, has_input_norm=True)
    block = TorchBlock(weights, CPU, torch.float32, 0)
    rope = rope_table(config, torch.float32, torch.device("cpu"))
    found = []
    with torch.inference_mode():
        for part, state in zip(passes, states, strict=True):
            at = torch.tensor(part.positions)
            attention = SlotAttention([part])
            found.append(block.forward(state, rope.gather(at, max(part.positions)), attention))
            part.slot.num_pending += part.num_rows
    return torch.cat(found)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_equals_transformers_layer(name: str) -> None:
    public = deepseek_config(**VARIANTS[name])
    layer = decoder_layer(public)
    config = DrafterConfig("deepseek_mtp", "", shape=checkpoint_shape(public))
    tensors = layer_tensors(layer)
    assert {k: tuple(v.shape) for k, v in tensors.items() if k != "input_layernorm.weight"} == block_shapes(
        config, "", public.hidden_size
    )
    shape = block_shape(config)
    assert (shape.num_kv_heads, shape.head_dim) == (1, public.kv_lora_rank + public.qk_rope_head_dim)

    # A chain of 90 rows, long enough to be attended unfolded, then a tree of three rows over it.
    n, random = 90, torch.Generator().manual_seed(3)
    states = torch.randn(n + 3, public.hidden_size, generator=random)
    positions = torch.tensor([*range(n), n, n + 1, n + 1])
    mask = torch.ones(n + 3, n + 3, dtype=torch.bool).tril()
    mask[n + 2, n + 1] = False
    wanted = run_layer(layer, public, states, positions, mask)

    layout = KVLayout(
        1, shape.num_kv_heads, shape.head_dim, torch.float32, torch.device("cpu"), values_are_keys=True
    )
    assert layout.bytes_per_token == 4 * (public.kv_lora_rank + public.qk_rope_head_dim)
    cache = KVCache(layout)
    slot = cache.get(cache.open(n + 3))
    first = Rows(slot, [0] * n, states[:n], list(range(n)))
    # Paths count from the settled rows, of which there are none yet.
    paths = [[*range(n), *(n + at for at in path)] for path in ([0], [0, 1], [0, 2])]
    tree = Rows(slot, [0] * 3, states[n:], positions[n:].tolist(), paths=paths)
    found = run_ours(config, tensors, [first, tree], [states[:n], states[n:]])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, states, atol=0.1)


@pytest.mark.parametrize(
    ("section", "change", "says"),
    [
        ("latent", {"kv_rank": 0}, "kv_rank must be at least 1"),
        ("latent", {"rope_dim": 7}, "rope_dim must be even"),
        ("latent", {"q_rank": None}, "q_rank must be of type int"),
        ("latent", {"depth": 1}, "unknown fields 'depth'"),
        ("experts", {"num_groups": 3}, "num_groups must divide num_experts"),
        ("experts", {"num_groups": 8}, "a group must have at least 2 experts"),
        ("experts", {"num_active_groups": 5}, "num_active_groups must not exceed num_groups"),
        ("experts", {"num_active": 5}, "num_active must not exceed the experts"),
        ("experts", {"scoring": "tanh"}, "scoring must be one of sigmoid, softmax"),
        ("experts", {"scale": True}, "scale must be of type float"),
        ("experts", {"scale": float("inf")}, "scale must be a finite number"),
        ("experts", {"num_experts": 1 << 30}, "num_experts must not exceed 4096"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(section: str, change: dict[str, Any], says: str) -> None:
    shape = checkpoint_shape(deepseek_config())
    shape[section] |= change
    with pytest.raises(CheckpointError, match=says):
        block_shapes(DrafterConfig("deepseek_mtp", "", shape=shape), "", 32)


def test_experts_beside_ordinary_heads_equal_qwen_moe() -> None:
    """Softmax scores, and a shared expert behind a gate of its own."""
    torch.manual_seed(0)
    public = Qwen2MoeConfig(
        hidden_size=32, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=6,
        num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    theirs = Qwen2MoeSparseMoeBlock(public).eval()
    state = theirs.state_dict()
    with torch.no_grad():
        for tensor in state.values():
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
    tensors = {
        "mlp.gate.weight": state["gate.weight"],
        "mlp.shared_expert_gate.weight": state["shared_expert_gate.weight"],
    }
    for index in range(6):
        gate, up = state["experts.gate_up_proj"][index].chunk(2)
        tensors[f"mlp.experts.{index}.gate_proj.weight"] = gate
        tensors[f"mlp.experts.{index}.up_proj.weight"] = up
        tensors[f"mlp.experts.{index}.down_proj.weight"] = state["experts.down_proj"][index]
    shape = ExpertsShape(6, 2, 16, "softmax", has_correction_bias=False, has_shared_gate=True)
    block = BlockShape(32, 24, 2, 2, 16, 1e-6, 1.0, experts=shape)
    experts = TorchExperts(read_experts(shape, tensors, "", torch.float32), block, CPU)
    rows = torch.randn(9, 32)
    with torch.no_grad():
        wanted = theirs(rows[None])
        wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).view(9, 32)
        assert experts.shared_gate is not None
        gated = F.silu(rows @ state["shared_expert.gate_proj.weight"].T) * (
            rows @ state["shared_expert.up_proj.weight"].T
        )
        shared = gated @ state["shared_expert.down_proj.weight"].T * experts.shared_gate(rows).sigmoid()
        torch.testing.assert_close(experts(rows) + shared, wanted, rtol=1e-5, atol=1e-5)
