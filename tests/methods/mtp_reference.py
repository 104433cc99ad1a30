"""Multi-token prediction written after the report and the public tensor names, over transformers' Llama layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from paceline.methods.deepseek_mtp.objective import MtpShape


class Module(nn.Module):
    """One module; its children bear the public names."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = LlamaDecoderLayer(config, 0)
        self.shared_head = nn.ModuleDict({"norm": LlamaRMSNorm(width, eps)})
        self.rotary = LlamaRotaryEmbedding(config)

    def load(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Takes every tensor that begins with a prefix, and no other."""
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        outer = ("enorm", "hnorm", "eh_proj", "shared_head")
        self.load_state_dict(
            {name if name.split(".")[0] in outer else f"block.{name}": value for name, value in own.items()}
        )

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """``[n, width]`` each; mask ``[n, n]`` bool, True where a row is seen."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))[None]
        bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[None, None]
        rotary = self.rotary(joined, positions[None])
        output = self.block(
            joined, attention_mask=bias, position_ids=positions[None], position_embeddings=rotary
        )
        return (output if isinstance(output, Tensor) else output[0])[0]


class ReferenceMtp:
    """Modules in sequence over a target's embedding and head, without caches."""

    def __init__(
        self, shape: MtpShape, tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor
    ) -> None:
        config = LlamaConfig(
            vocab_size=shape.target_vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=shape.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            attn_implementation="eager",
        )
        self.shape, self.embedding, self.head = shape, embedding, head
        self.modules = [Module(config) for _ in range(shape.num_modules)]
        for index, module in enumerate(self.modules):
            module.load(tensors, f"layers.{index}.")

    @torch.no_grad()
    def logits(self, features: Tensor, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Logits of the token behind `tokens`, and behind each of a chain: `[1 + len(drafted), vocab]`.

        At depth j module j runs all rows up to the last true one, as the report has it; behind the last module the
        first goes on from its output, with the rows that it ran before.
        """
        count, last, whole = len(self.modules), len(tokens) - 2, [*tokens, *drafted]
        state = features[: last + 1]
        ran: list[tuple[Tensor, Tensor, list[int]]] = []  # of each module: embedded, hidden, positions
        all_logits = []
        for j in range(1 + len(drafted)):
            k = j % count
            if j < count:  # row i: what the module before gave for i, with token i + 1 + j
                ids = torch.tensor(whole[1 + j : 2 + j + last])
                ran.append((F.embedding(ids, self.embedding), state, list(range(last + 1))))
            else:
                embedded, hidden, positions = ran[k]
                ran[k] = (
                    torch.cat([embedded, self.embedding[whole[1 + j + last]][None]]),
                    torch.cat([hidden, state[-1:]]),
                    [*positions, last + j - k],
                )
            state, normed = self.run(k, *ran[k])
            all_logits.append(normed[-1:] @ self.head.T)
        return torch.cat(all_logits)

    def run(
        self, index: int, embedded: Tensor, hidden: Tensor, positions: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """One module over rows `[n, width]`, at 0, 1, ... unless told: what is handed on, and what the head reads."""
        n, module = len(hidden), self.modules[index]
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        raw = module(
            embedded, hidden, torch.arange(n) if positions is None else torch.tensor(positions), mask
        )
        normed = module.shared_head["norm"](raw)
        return (normed if self.shape.carries_norm else raw), normed
