"""How much of the key-value cache a verifier commits before it serves."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.cpu.memory_pool import MemoryPool
from paceline.target.kv.cache import KVCache
from services.verifier.host import VerifierHost
from services.verifier.settings import POOL_MIB_WITHOUT_LIMIT, VerifierSettings
from tests.verifier.conductor import MAX_POSITIONS


@pytest.mark.parametrize(
    ("fields", "expected_mib"),
    [
        ({}, POOL_MIB_WITHOUT_LIMIT),
        ({"kv_limit_mib": 3}, 3),
        ({"kv_limit_mib": 3, "kv_pool_mib": 1}, 1),
        ({"kv_pool_mib": 0}, 0),
    ],
)
def test_the_pool_is_the_limit_unless_told_otherwise(fields: dict[str, int], expected_mib: int) -> None:
    assert VerifierSettings(model="m", **fields).kv_pool_bytes == expected_mib << 20  # type: ignore[arg-type]


def test_a_pool_above_the_limit_is_refused() -> None:
    with pytest.raises(ValidationError, match="at most kv_limit_mib"):
        VerifierSettings(model="m", kv_limit_mib=3, kv_pool_mib=4)


def test_no_more_is_committed_than_sequences_can_fill(target_dir: Path) -> None:
    settings = VerifierSettings(model=str(target_dir), dtype="float32", max_sequences=2, profile_s=0)
    cache = VerifierHost.load(settings, 1).engine.cache
    assert pool_of(cache).num_faulted_bytes == 2 * MAX_POSITIONS * cache.layout.bytes_per_token
    none = VerifierSettings(model=str(target_dir), dtype="float32", kv_pool_mib=0, profile_s=0)
    assert pool_of(VerifierHost.load(none, 1).engine.cache).num_bytes == 0


def pool_of(cache: KVCache) -> MemoryPool:
    assert isinstance(cache._pool, MemoryPool)
    return cache._pool
