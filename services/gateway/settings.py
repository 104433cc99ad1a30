"""Settings of the gateway process.

Responsible for: its fields and their defaults. Deliberately does not know: how they are read
(:mod:`services.runtime.settings`). Used by :mod:`services.gateway.__main__`.
"""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.runtime.settings import Port, ServerSettings


class GatewaySettings(ServerSettings):
    """Client-facing gateway: checks and tokenises requests, streams text."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_GATEWAY_")

    port: Port = Field(50050, description="gRPC port; 0 picks a free one")
    metrics_port: Port | None = Field(9100, description="Prometheus port; 0 picks a free one")
    model: str = Field(
        description="name of a fetched model, or a directory with its tokenizer and chat template"
    )
    orchestrator: str = Field("127.0.0.1:50054", description="host:port of the director")
    served_model_name: str | None = Field(None, description="name that requests use; absent: the verifier's")
    max_requests: int = Field(256, ge=1, le=100_000, description="most completions in flight")
    max_prompt_bytes: int = Field(
        4 << 20, ge=1, le=64 << 20, description="longest prompt text that is tokenised"
    )
    request_timeout_s: float = Field(600.0, gt=0, le=86_400, description="deadline of a call that has none")
    silence_timeout_s: float = Field(60.0, gt=0, le=3600, description="longest silence of a conductor")
    refresh_s: float = Field(5.0, gt=0, le=3600, description="how often the director is asked what is served")
