"""Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1; DeepSeek-V3, 2412.19437, section 2.1.1).

Keys and values of all heads are linear maps of one latent vector a position, beside a rotary key that the heads share.
This file describes the attention and computes nothing. The caches of drafters keep the latent and the rotary key, and
not the heads' keys and values: the maps are absorbed into the queries and the output, so that all heads attend to one
shared key head of `cache_width`. For DeepSeek-V3 that is 576 numbers in place of 40,960.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.model.projection import Projection

LATENT_NORM_EPS = 1e-6
"""Of the norms of latents. DeepSeek's code and transformers' do not read `rms_norm_eps` for them."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of the attention.

    Attributes:
        q_rank: width of the queries' latent; 0 where one product gives the queries.
        kv_rank: width of the latent of keys and values.
        nope_dim: part of a head's key that is not rotated.
        rope_dim: part that is rotated; all heads share its key.
        value_dim: width of a head's values.
        interleaved: stored weights give the two numbers of a rotary pair as neighbours; False gives them half of
            `rope_dim` apart.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True

    @property
    def key_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def cache_width(self) -> int:
        """Numbers that a cache keeps of a position: the latent, then the rotated key."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """What follows the first products, which are `BlockWeights.qkv`: queries or their latent, the latent of keys and
    values, and the rotary key. Rotary pairs are half of `rope_dim` apart, whatever the checkpoint had.

    Attributes:
        query_norm: `[q_rank]`, or None without a latent of queries.
        query_up: `[num_heads * key_dim, q_rank]`, or None.
        latent_norm: `[kv_rank]`.
        key_up: `[num_heads, nope_dim, kv_rank]`.
        value_up: `[num_heads, value_dim, kv_rank]`.
    """

    query_norm: Tensor | None
    query_up: Projection | None
    latent_norm: Tensor
    key_up: Tensor
    value_up: Tensor
