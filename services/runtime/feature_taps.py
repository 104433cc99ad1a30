"""A feature tap as verifier and drafter describe it in their handshake.

Both ends load the same checkpoint. The fingerprint of its projection shows whether they loaded the same weights.
"""

from __future__ import annotations

import hashlib

import torch

from paceline.target import TapSpec
from paceline.v1 import peer_pb2


def feature_tap(spec: TapSpec | None, hidden_size: int) -> peer_pb2.FeatureTap:
    """The message of a tap; empty without one."""
    if spec is None:
        return peer_pb2.FeatureTap()
    fingerprint = ""
    if spec.projection is not None:
        weights = spec.projection.detach().to(torch.float32).contiguous().cpu().numpy().tobytes()
        fingerprint = hashlib.sha256(weights).hexdigest()
    return peer_pb2.FeatureTap(
        layers=list(spec.layers),
        width=spec.width(hidden_size),
        projection_fingerprint=fingerprint,
        final_norm=spec.norm_final,
        last_only=spec.last_only,
        is_optional=spec.is_optional,
        cached_layers=[
            peer_pb2.CachedLayer(
                layer=cached.layer,
                num_kv_heads=cached.num_kv_heads,
                head_dim=cached.head_dim,
                window=cached.window,
            )
            for cached in spec.cached
        ],
    )


def describe_tap(tap: peer_pb2.FeatureTap) -> str:
    """A tap for people, in an error message."""
    parts = [f"layers {list(tap.layers)}"] if tap.layers else []
    parts += ["the final norm"] if tap.final_norm else []
    parts += [f"cached layers {[cached.layer for cached in tap.cached_layers]}"] if tap.cached_layers else []
    where = "the last position" if tap.last_only else "all positions"
    return f"{' and '.join(parts) or 'nothing'} at width {tap.width} of {where}"
