"""The generic executor: any decoder that transformers can load, over our own cache.

Runs a transformers model on the flattened rows of a step. The model's own classes do everything except attention:
transformers' attention registry replaces that by ours, which reads and writes KV slots. This file knows no
architecture. The engine uses it for models that the lean executor does not cover, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from paceline.model.device import Device
from paceline.model.torch_block import Scoring
from paceline.model.weights import UnsupportedModelError
from paceline.target.attention.attend import StepPlan
from paceline.target.executor import FINAL_NORM, ExecutorOutput, ModelShape, nothing
from paceline.target.executors.heads_probe import HeadsProbe

ATTENTION_NAME = "paceline"


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paceline_plan: StepPlan | HeadsProbe | None = None,
    **unsupported: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: `[1, heads, n, key_dim]` in, `[1, n, heads, value_dim]` out.

    The cache gives keys and values one width. The narrower of the two is padded with zeros; they add nothing to scores.
    """
    if paceline_plan is None:
        raise UnsupportedModelError("the model does not hand keyword arguments down to its attention")
    if unsupported.get("s_aux") is not None:
        raise UnsupportedModelError("attention sinks are not supported")
    if attention_mask is not None:
        raise UnsupportedModelError("the model masks attention in a way of its own, which is not supported")
    heads, n, key_dim = query.shape[1:]
    kv_heads, value_dim = key.shape[1], value.shape[3]
    group, width = heads // kv_heads, max(key_dim, value_dim)
    scoring = Scoring(key_dim**-0.5 if scaling is None else float(scaling), sliding_window, softcap)
    if key_dim != value_dim:
        query, key, value = (F.pad(part, (0, width - part.shape[3])) for part in (query, key, value))
    queries = query[0].view(kv_heads, group, n, width).permute(2, 1, 0, 3).contiguous()
    keys_values = torch.cat([key[0], value[0]]).transpose(0, 1)  # [n, 2 * kv_heads, width]
    mixed = paceline_plan.attend(queries, keys_values, int(module.layer_idx), scoring)
    out = mixed.view(n, group, kv_heads, width)[..., :value_dim].transpose(1, 2)
    return out.reshape(1, n, heads, value_dim), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Visibility comes from the step plan; transformers builds no mask."""


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _load(model_dir: Path, dtype: torch.dtype) -> Any:
    """A model with all its weights. transformers itself only warns of missing ones, and leaves them random."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        output_loading_info=True,
    )
    model, found = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if names := sorted(str(name) for name in found[kind]):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UnsupportedModelError(
                f"{model_dir.name!r}: {kind.replace('_', ' ')} of {type(model).__name__}: {', '.join(names[:3])}{more}"
            )
    return model.eval()


class GenericExecutor:
    """Runs one transformers model; see the module docstring."""

    joins_neighbours = True

    def __init__(self, config: Any, model_dir: Path, device: Device, dtype: torch.dtype) -> None:
        text = config.get_text_config()
        heads = text.num_attention_heads
        self._model = _load(model_dir, dtype).to(device.torch_device)
        if getattr(self._model, "_is_stateful", False):
            raise UnsupportedModelError(
                f"{type(self._model).__name__} keeps states besides keys and values (linear attention or a state "
                "space), which drafts could not be taken back from"
            )
        self._decoder = self._model.get_decoder()
        layers = getattr(self._decoder, "layers", None)
        if layers is None or len(layers) != text.num_hidden_layers:
            raise UnsupportedModelError(f"{type(self._model).__name__} has no plain list of decoder layers")
        self._captured: dict[int, Tensor] = {}
        self._wanted: frozenset[int] = frozenset()
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._capture_input(index), with_kwargs=True)
            layer.register_forward_hook(self._capture_output(index + 1, len(layers)))
        self._decoder.register_forward_hook(self._capture_final)
        self.num_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        own = self._probe_heads(text.num_hidden_layers, device.torch_device)
        self.shape = ModelShape(
            config.model_type,
            text.num_hidden_layers,
            text.hidden_size,
            heads,
            max(kv_heads for kv_heads, _ in own),
            max(head_dim for _, head_dim in own),
            text.vocab_size,
            text.max_position_embeddings,
            own if len(set(own)) > 1 else (),
        )

    def _probe_heads(self, num_layers: int, where: torch.device) -> tuple[tuple[int, int], ...]:
        probe = HeadsProbe()
        try:
            try:
                self._run_probe(probe, where)
            except RuntimeError:
                # Grouped products of experts take neither float64 nor widths that are no multiple of 16 bytes.
                self._model.set_experts_implementation("eager")
                self._run_probe(probe, where)
        except (
            AttributeError,
            TypeError,
            ValueError,
        ) as error:  # such as a mask that the model reads by itself
            raise UnsupportedModelError(
                f"{type(self._model).__name__} does not run over Paceline's attention and cache: {error}"
            ) from error
        return probe.layer_heads(num_layers)

    @torch.inference_mode()
    def _run_probe(self, probe: HeadsProbe, where: torch.device) -> None:
        one = torch.zeros(1, dtype=torch.int64, device=where)
        inputs = {"input_ids": one[None], "position_ids": one[None], "logits_to_keep": one}
        self._model(**inputs, use_cache=False, paceline_plan=probe)

    def _capture_input(self, index: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index in self._wanted:
                self._captured[index] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    def _capture_output(self, index: int, num_layers: int) -> Any:
        def hook(_: Any, __: tuple[Any, ...], output: Any) -> None:
            if index == num_layers and index in self._wanted:
                self._captured[index] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    def _capture_final(self, _: Any, __: tuple[Any, ...], output: Any) -> None:
        if FINAL_NORM in self._wanted:
            self._captured[FINAL_NORM] = output[0][0]

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of `tokens` `[n]`: `[n, hidden]`."""
        out: Tensor = self._model.get_input_embeddings()(tokens)
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of normed states by the output embedding alone, before any scaling the model applies."""
        out: Tensor = self._model.get_output_embeddings()(hidden).float()
        return out

    def forward(self, plan: StepPlan, on_begin: Callable[[], None] = nothing) -> ExecutorOutput:
        """Run the planned rows."""
        on_begin()
        self._captured, self._wanted = {}, plan.capture
        rows = (
            torch.arange(plan.num_rows, device=plan.tokens.device)
            if plan.logit_rows is None
            else plan.logit_rows
        )
        inputs = {"input_ids": plan.tokens[None]}
        if plan.added is not None:
            embedded = self.embed(plan.tokens)
            inputs = {"inputs_embeds": (embedded + plan.added.to(embedded))[None]}
        result = self._model(
            **inputs,
            position_ids=plan.positions[None],
            use_cache=False,
            logits_to_keep=rows,
            paceline_plan=plan,
        )
        final = self._captured.pop(FINAL_NORM, None)
        return ExecutorOutput(result.logits[0].float(), self._captured, final)
