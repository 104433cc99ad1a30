"""The drafter's identity and limits, as the handshake sends them."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import torch

from paceline import PROTOCOL_VERSION
from paceline.contract.errors import IncompatiblePeerError
from paceline.methods.drafter import Drafter
from paceline.models import model_fingerprint, tokenizer_fingerprint
from paceline.target import TapSpec
from paceline.v1 import peer_pb2
from services.runtime.devices import describe_device
from services.runtime.feature_taps import feature_tap

UNBOUNDED_POSITIONS = 1 << 20


def target_config(model_dir: Path) -> dict[str, Any]:
    """The target's configuration.

    Raises:
        IncompatiblePeerError: it is missing or not JSON.
    """
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IncompatiblePeerError(f"{model_dir.name} is not a model directory: {error}") from error
    text_config: dict[str, Any] = config.get("text_config", config)
    return text_config


def peer_info(
    drafter: Drafter,
    model_dir: Path,
    *,
    device: str,
    dtype: torch.dtype,
    tap: TapSpec | None,
    max_positions: int | None,
    name: str = "",
) -> peer_pb2.PeerInfo:
    """Identity and limits of this process.

    Args:
        drafter: the drafter that the process hosts.
        model_dir: the target.
        device: the device that it computes on.
        dtype: the type that it computes in.
        tap: the features it reads, as the checkpoint defines them; None where it reads none.
        max_positions: positions the drafter has; None where only the target bounds them.
        name: the name by which requests may ask for it; empty where it has none.
    """
    config = target_config(model_dir)
    target_positions = int(config.get("max_position_embeddings") or UNBOUNDED_POSITIONS)
    return peer_pb2.PeerInfo(
        protocol_version=PROTOCOL_VERSION,
        instance_id=secrets.token_hex(8),
        model_fingerprint=model_fingerprint(model_dir),
        tokenizer_fingerprint=tokenizer_fingerprint(model_dir),
        vocab_size=int(config["vocab_size"]),
        max_positions=min(target_positions, max_positions or UNBOUNDED_POSITIONS),
        dtype=str(dtype).removeprefix("torch."),
        method=drafter.method,
        tap=feature_tap(tap, int(config["hidden_size"])),
        device=describe_device(device),
        model_name=model_dir.name,
        drafter_name=name,
        longest_draft=drafter.longest_draft or 0,
    )
