"""Who this verifier is, for the handshake."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import torch

from paceline import PROTOCOL_VERSION
from paceline.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from paceline.target import TargetEngine
from paceline.v1 import peer_pb2
from services.runtime.devices import describe_device
from services.runtime.feature_taps import feature_tap
from services.verifier.colocated import ColocatedDrafter


def eos_token_ids(model_dir: Path) -> list[int]:
    """Tokens that end a text by default: the generation config's, else the model config's."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            if value is not None:
                return [int(token) for token in (value if isinstance(value, list) else [value])]
    return []


def peer_info(
    engine: TargetEngine, model_dir: Path, model_name: str, device: str, drafter: ColocatedDrafter | None
) -> peer_pb2.PeerInfo:
    """Identity and limits of this process, and of the drafter in it where it has one."""
    taps = engine.taps
    described = describe_device(device)
    if engine.device.kind == "cpu":  # curves measured with other thread counts are other curves
        described.name = f"{described.name}, {torch.get_num_threads()} threads"
    return peer_pb2.PeerInfo(
        protocol_version=PROTOCOL_VERSION,
        instance_id=secrets.token_hex(8),
        model_fingerprint=model_fingerprint(model_dir),
        tokenizer_fingerprint=tokenizer_fingerprint(model_dir),
        vocab_size=engine.shape.vocab_size,
        max_positions=engine.shape.max_positions,
        dtype=str(engine.weight_dtype).removeprefix("torch."),
        method="" if drafter is None else drafter.method,
        tap=feature_tap(taps[0] if taps else None, engine.shape.hidden_size),
        device=described,
        model_name=model_name,
        eos_token_ids=eos_token_ids(model_dir),
        longest_draft=0 if drafter is None else drafter.longest_draft or 0,
    )
