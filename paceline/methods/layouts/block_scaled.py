"""Weights in 8 bits with a scale for each square block, as DeepSeek-V3 is published (2412.19437, section 3.3.2).

`NAME.weight` is float8 e4m3, `NAME.weight_scale_inv` float32 holds one factor for each block of
`quantization_config.weight_block_size`. Reading multiplies them, as DeepSeek's own `fp8_cast_bf16.py` does: a drafter
computes in its own type. Nothing else of a quantised checkpoint is supported.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError
from paceline.methods.layouts.public_config import PublicConfig

_SCALE = "_scale_inv"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def read_scaled(config: PublicConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with block-scaled weights as bfloat16 and without their scales.

    Args:
        config: the whole file's; its `quantization_config` is taken, if it has one.
        tensors: as stored.

    Raises:
        CheckpointError: naming another kind of quantisation, or a weight and a scale that do not fit.
    """
    block = _block_size(config)
    found = dict(tensors)
    for name in [name for name in found if name.endswith(_SCALE)]:
        scale, weight_name = found.pop(name), name.removesuffix(_SCALE)
        if block is None:
            raise CheckpointError(
                f"{name}: config.json has no quantization_config, which gives the blocks' size"
            )
        if weight_name not in found:
            raise CheckpointError(f"{name} scales {weight_name}, which is missing")
        found[weight_name] = _scaled(weight_name, found[weight_name], scale, block)
    for name, tensor in found.items():
        if tensor.dtype in _FLOAT8:
            raise CheckpointError(f"{name} is {tensor.dtype} without {name}{_SCALE}, by which it is scaled")
    return found


def _block_size(config: PublicConfig) -> tuple[int, int] | None:
    if "quantization_config" not in config:
        return None
    section = config.section("quantization_config")
    because = "8-bit weights with a scale for each block (fp8, e4m3) are read, and no other quantisation"
    section.expect("quant_method", "fp8", because=because)
    section.expect("fmt", "e4m3", because=because)
    # How engines round activations; which tensors are quantised, and how scales were rounded, the tensors show.
    section.without_effect("activation_scheme", "modules_to_not_convert", "ignored_layers", "scale_fmt")
    size = section.sizes("weight_block_size")
    if size is None or len(size) != 2 or not all(size):
        raise section.error("weight_block_size", f"must be two positive whole numbers: {because}")
    return size[0], size[1]


def _scaled(name: str, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    if weight.ndim != 2 or weight.dtype != torch.float8_e4m3fn:
        raise CheckpointError(f"{name} has a scale, and is not a float8 e4m3 matrix but {weight.dtype}")
    wanted = tuple(-(-size // part) for size, part in zip(weight.shape, block, strict=True))
    if tuple(scale.shape) != wanted or not scale.is_floating_point():
        raise CheckpointError(f"{name}{_SCALE} has shape {tuple(scale.shape)}, not {wanted}")
    rows, columns = weight.shape
    wide = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * wide).bfloat16()
