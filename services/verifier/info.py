"""Who this verifier is, for the handshake."""

from __future__ import annotations

import secrets
from pathlib import Path

import torch

from paceline import PROTOCOL_VERSION
from paceline.models.end_tokens import end_tokens
from paceline.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from paceline.target import TargetEngine
from paceline.v1 import peer_pb2
from services.runtime.devices import describe_device
from services.runtime.feature_taps import feature_tap
from services.verifier.colocated import ColocatedDrafter


def peer_info(
    engine: TargetEngine, model_dir: Path, model_name: str, device: str, drafter: ColocatedDrafter | None
) -> peer_pb2.PeerInfo:
    """Identity and limits of this process, and of the drafter in it, if there is one."""
    taps = engine.taps
    described = describe_device(device)
    if engine.device.kind == "cpu":  # step times depend on the thread count
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
        eos_token_ids=end_tokens(model_dir),
        longest_draft=0 if drafter is None else drafter.longest_draft or 0,
    )
