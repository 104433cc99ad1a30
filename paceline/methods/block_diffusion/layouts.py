"""Layouts that the authors of block drafters publish in: z-lab's for DFlash, and DeepSpec's for DFlash and DSpark.

Both have a flat `config.json` in Qwen3's words with a block's fields, and tensors under the names of the speculators
format, whose code reads and writes them. z-lab's has neither embedding nor head: both are the target's. DeepSpec's has
frozen copies of them, and every row of its blocks proposes the token after its own.

`target_layer_ids` of both name layers whose *output* is read, one less than the layer that the same stream enters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.layouts.layout import Layout
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import write_tensors
from paceline.methods.speculators.config import write_config
from paceline.methods.speculators.layout import public_tensors, read_content

_ZLAB, _DEEPSPEC = "DFlashDraftModel", "Qwen3DSparkModel"
_NOT_COMPUTED = {
    "is_causal": None,
    "causal": False,
    "use_swa": False,
    "attention_sink_bias": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
"""Fields that change what is computed, with the value of each that changes nothing."""


def is_dflash(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of z-lab's layout."""
    return "speculators_model_type" not in content and content.get("architectures") == [_ZLAB]


def is_deepspec(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of DeepSpec's layout."""
    return content.get("architectures") == [_DEEPSPEC]


def read_dflash(checkpoint: PublicCheckpoint, target: TargetFacts) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a checkpoint of z-lab's layout.

    Raises:
        CheckpointError: naming what is missing, surplus, of another shape or not computed.
    """
    content = checkpoint.config.unchecked()
    own = content.get("dflash_config", {})
    if not isinstance(own, Mapping):
        raise CheckpointError("dflash_config must be an object")
    if "candidate_selector" in own or "selector_rank" in own:
        raise CheckpointError("dflash_config.selector_rank: DFlash 2 is not computed")
    found = {**content, **own}
    ids = found.get("target_layer_ids")
    if ids is None:
        ids = _spread(target.num_layers, content.get("num_hidden_layers"))
    return _read(
        checkpoint.directory, target, found, "dflash", ids, {"sample_from_anchor": False}, default_size=16
    )


def read_deepspec(
    checkpoint: PublicCheckpoint, target: TargetFacts
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a checkpoint of DeepSpec's layout: as `dspark`, or as `dflash` if it has no Markov head.

    Raises:
        CheckpointError: as of :func:`read_dflash`.
    """
    content = checkpoint.config.unchecked()
    kind = "dspark" if content.get("markov_rank", 0) else "dflash"
    if kind == "dflash" and content.get("enable_confidence_head"):
        raise CheckpointError(
            "enable_confidence_head: a confidence head without a Markov head is not computed"
        )
    more = {"sample_from_anchor": True}
    for name in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
        if name in content:
            more[name] = content[name]
    return _read(checkpoint.directory, target, content, kind, content.get("target_layer_ids"), more)


def write_dflash(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of z-lab's layout.

    Raises:
        CheckpointError: naming what the layout cannot express.
    """
    if config.method != "dflash":
        raise CheckpointError(f"z-lab's layout holds dflash, not {config.method!r}")
    content = _flat(config, "z-lab's", _ZLAB, tensors["fc.weight"].dtype)
    if config.flag("anchor_first"):
        raise CheckpointError(
            "shape.anchor_first: z-lab's layout has no blocks whose anchor proposes something"
        )
    for name in ("has_embedding", "has_head"):
        if config.flag(name):
            raise CheckpointError(f"shape.{name}: z-lab's layout has the target's own")
    content["dflash_config"] = {
        name: content.pop(name) for name in ("mask_token_id", "target_layer_ids", "block_size")
    }
    content["block_size"] = content["dflash_config"]["block_size"]
    write_tensors(directory, "model.safetensors", content, public_tensors(config, tensors))


def write_deepspec(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of DeepSpec's layout.

    Raises:
        CheckpointError: naming what the layout cannot express.
    """
    content = _flat(config, "DeepSpec's", _DEEPSPEC, tensors["fc.weight"].dtype)
    if not config.flag("anchor_first"):
        raise CheckpointError(
            "shape.anchor_first: every row of a block proposes something in DeepSpec's layout"
        )
    for name in ("has_embedding", "has_head"):
        if not config.flag(name):
            raise CheckpointError(f"shape.{name}: DeepSpec's layout stores it: name the target")
    content |= {"num_anchors": 512, "tie_word_embeddings": False}
    if config.method == "dflash":
        content |= {"markov_rank": 0, "enable_confidence_head": False}
    write_tensors(directory, "model.safetensors", content, public_tensors(config, tensors))


def count_target_layers(
    config: DrafterConfig, tensors: Mapping[str, Tensor], target_dir: Path
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Add what z-lab's layout says of the target: its number of layers."""
    shape = {**config.shape, "num_target_layers": TargetFacts.read(target_dir).num_layers}
    return replace(config, shape=shape), dict(tensors)


def store_target_vocabulary(
    config: DrafterConfig, tensors: Mapping[str, Tensor], target_dir: Path
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Add what DeepSpec's layout has of the target: its embedding, its head, and its number of layers."""
    config, out = count_target_layers(config, tensors, target_dir)
    target, dtype = TargetFacts.read(target_dir), tensors["fc.weight"].dtype
    out.setdefault("embed_tokens.weight", target.embedding(dtype))
    out.setdefault("lm_head.weight", target.head(dtype))
    return replace(config, shape={**config.shape, "has_embedding": True, "has_head": True}), out


def _read(
    directory: Path,
    target: TargetFacts,
    found: Mapping[str, Any],
    kind: str,
    ids: object,
    more: Mapping[str, Any],
    default_size: int = 7,
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read either layout, translated into the words of the speculators format."""
    for name, plain in _NOT_COMPUTED.items():
        if found.get(name, plain) not in (plain, None):
            raise CheckpointError(f"{name} {found[name]!r} is not computed")
    if found.get("num_target_layers", target.num_layers) != target.num_layers:
        raise CheckpointError(
            f"num_target_layers is {found['num_target_layers']}, the target has {target.num_layers}: it is another's"
        )
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise CheckpointError(f"target_layer_ids {ids!r} are no layers of the target")
    layer = {name: value for name, value in found.items() if name not in ("architectures", "dflash_config")}
    content = {
        "speculators_model_type": kind,
        "transformer_layer_config": {"model_type": "qwen3", **layer},
        "draft_vocab_size": found.get("vocab_size"),
        "aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "mask_token_id": found.get("mask_token_id"),
        "block_size": found.get("block_size", default_size),
        **more,
    }
    layout = "dflash" if is_dflash(found) else "deepspec"
    config, tensors = read_content(directory, content, target, {"imported_from": layout})
    return replace(config, shape={**config.shape, "num_target_layers": target.num_layers}), tensors


def _flat(config: DrafterConfig, whose: str, architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """A `config.json` of either layout."""
    content = write_config(config)
    if config.size("draft_vocab") != config.size("target_vocab"):
        raise CheckpointError(
            f"shape.draft_vocab: {whose} layout has whole vocabularies; speculators has others"
        )
    ids = [layer - 1 for layer in content["aux_hidden_state_layer_ids"]]
    if min(ids) < 0:
        raise CheckpointError(f"shape.tap_layers: {whose} layout has no name for the stream entering layer 0")
    if "num_target_layers" not in config.shape:
        raise CheckpointError(
            f"shape.num_target_layers: {whose} layout says how many layers the target has: name it"
        )
    kept = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    return {
        **content["transformer_layer_config"],
        "architectures": [architecture],
        "num_target_layers": config.size("num_target_layers"),
        "block_size": content["block_size"],
        "mask_token_id": content["mask_token_id"],
        "target_layer_ids": ids,
        "dtype": str(dtype).removeprefix("torch."),
        **{name: content[name] for name in kept if name in content},
    }


def _spread(num_target_layers: int, num_layers: object) -> list[int]:
    """The layers that z-lab reads if a file names none: evenly spread from the second to the third before the last."""
    if not isinstance(num_layers, int) or num_layers < 1:
        raise CheckpointError(f"num_hidden_layers must be a positive whole number, not {num_layers!r}")
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers)]


DFLASH = Layout("dflash", is_dflash, read_dflash, write_dflash, count_target_layers)
DEEPSPEC = Layout("deepspec", is_deepspec, read_deepspec, write_deepspec, store_target_vocabulary)
