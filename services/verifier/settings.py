"""Settings of the verifier process, with their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from paceline.contract import limits
from services.runtime.settings import Port, ServerSettings
from services.verifier.ngram import MAX_NGRAM_TOKENS

PREFIX_MIB_WITHOUT_LIMIT = 256
POOL_MIB_WITHOUT_LIMIT = 256


class VerifierSettings(ServerSettings):
    """Paceline verifier: hosts the target and decides every token."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_VERIFIER_")

    port: Port = Field(50051, description="gRPC port; 0 picks a free one")
    metrics_port: Port | None = Field(
        9101, description="Prometheus port; 0 picks a free one, empty turns it off"
    )
    model: str = Field(description="name of a fetched model or a local directory")
    device: str = Field("cpu", description="cpu, cuda:0, cuda:1, ...")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="compute and cache dtype"
    )
    executor: Literal["auto", "native", "lean", "generic"] = Field("auto", description="how the model is run")
    threads: int | None = Field(
        None, ge=1, le=limits.MAX_THREADS, description="torch threads; one per core where absent"
    )
    cores: str | None = Field(None, description="cores to compute on, such as 0-3,6")
    row_buckets: tuple[int, ...] = Field((), description="pad each step's rows to the next of these counts")
    kv_limit_mib: int | None = Field(None, ge=1, description="bound on the KV cache, MiB; absent: none")
    kv_pool_mib: int | None = Field(
        None,
        ge=0,
        description="memory of the KV cache to commit before serving, on CPU, MiB; 0: none, steps then wait for it; "
        f"absent: the KV limit, or {POOL_MIB_WITHOUT_LIMIT} without one; never more than the sequences can fill",
    )
    prefix_cache_mib: int | None = Field(
        None,
        ge=0,
        description="most memory for prefixes of ended texts, MiB; 0: no sharing of prefixes; absent: half of the KV "
        f"limit, or {PREFIX_MIB_WITHOUT_LIMIT} without one",
    )
    max_sequences: int = Field(
        limits.DEFAULT_MAX_SEQUENCES,
        ge=1,
        le=limits.MAX_SEQUENCES,
        description="sequences that may run at once",
    )
    max_waiting: int = Field(
        256, ge=1, le=limits.MAX_SEQUENCES, description="sequences that may wait for room"
    )
    profile_s: float = Field(
        1.0, ge=0, le=60, description="most time to spend on timed steps before serving; 0: none"
    )
    drafter: Path | None = Field(None, description="drafter checkpoint to host in this process (co-located)")
    ngram_tokens: int = Field(
        8,
        ge=0,
        le=MAX_NGRAM_TOKENS,
        description="most tokens to propose from what a text itself repeats, beside any drafter; 0: none",
    )
    tap_from: Path | None = Field(
        None, description="drafter checkpoint whose feature tap to serve to drafters elsewhere"
    )

    @model_validator(mode="after")
    def _check_pool(self) -> VerifierSettings:
        if self.kv_pool_mib and self.kv_limit_mib is not None and self.kv_pool_mib > self.kv_limit_mib:
            raise ValueError(f"kv_pool_mib must be at most kv_limit_mib, {self.kv_limit_mib}")
        return self

    @property
    def kv_pool_bytes(self) -> int:
        """Most bytes of the KV cache to commit before serving."""
        if self.kv_pool_mib is not None:
            return self.kv_pool_mib << 20
        return (POOL_MIB_WITHOUT_LIMIT if self.kv_limit_mib is None else self.kv_limit_mib) << 20

    @property
    def prefix_cache_bytes(self) -> int:
        """Most bytes of kept prefixes; 0 where prefixes are not shared."""
        if self.prefix_cache_mib is not None:
            return self.prefix_cache_mib << 20
        return PREFIX_MIB_WITHOUT_LIMIT << 20 if self.kv_limit_mib is None else self.kv_limit_mib << 19
