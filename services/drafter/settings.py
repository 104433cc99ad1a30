"""Settings of the drafter process, with their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from paceline.contract import limits
from services.runtime.settings import Port, ServerSettings


class DrafterSettings(ServerSettings):
    """Paceline drafter: hosts one drafter and proposes tokens to conductors."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_DRAFTER_")

    port: Port = Field(50052, description="gRPC port; 0 picks a free one")
    metrics_port: Port | None = Field(
        9102, description="Prometheus port; 0 picks a free one, empty turns it off"
    )
    drafter: Path = Field(description="drafter checkpoint, a local directory")
    model: str = Field(description="target it was made for: name of a fetched model or a local directory")
    name: str = Field(
        "",
        max_length=64,
        description="name by which requests may ask for this drafter, beside its method",
    )
    device: str = Field("cpu", description="cpu, cuda:0, cuda:1, ...")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="compute dtype")
    threads: int | None = Field(
        None, ge=1, le=limits.MAX_THREADS, description="torch threads; one per core where absent"
    )
    cores: str | None = Field(None, description="cores to compute on, such as 0-3,6")
    max_sequences: int = Field(
        limits.DEFAULT_MAX_SEQUENCES,
        ge=1,
        le=limits.MAX_SEQUENCES,
        description="sequences held at once, all conductors together",
    )
    feature_wait_ms: float = Field(
        100.0,
        ge=0,
        le=10_000,
        description="longest wait of a draft for features; after it the draft is made without them, or not at all",
    )
    feature_gather_ms: float = Field(
        1.0,
        ge=0,
        le=100,
        description="longest wait for the features of further sequences, to draft for all of them together",
    )
    feature_loss_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="features that are missing for longer count as lost, and the sequence fails at this drafter",
    )
