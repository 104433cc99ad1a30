"""Settings of the orchestrator, and the environment of an embedded Ray."""

from __future__ import annotations

import pytest

from orchestrator.ray_environment import prepare_environment
from orchestrator.settings import OrchestratorSettings


@pytest.mark.parametrize(
    "changes",
    [
        {"verifiers": ()},
        {"verifiers": ("h:1", "h:1")},
        {"verifiers": ("nonsense",)},
        {"drafters": ("h:0",)},
        {"feature_endpoints": ("h:1", "h:2")},
        {"feature_endpoints": ("nonsense",)},
        {"draft_length": 65},
        {"wait_budget_us": -1},
        {"placement": "elsewhere"},
        {"unknown": 1},
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        OrchestratorSettings(**({"verifiers": ("h:1",)} | changes))  # type: ignore[arg-type]


def test_lists_of_endpoints_are_split_at_commas() -> None:
    settings = OrchestratorSettings(verifiers="a:1, b:2", drafters="c:3")  # type: ignore[arg-type]
    assert settings.verifiers == ("a:1", "b:2")
    assert settings.drafters == ("c:3",)


def test_embedded_ray_gets_a_token_of_its_own() -> None:
    first, second, joined = {"RAY_AUTH_TOKEN_PATH": "x"}, dict[str, str](), {"RAY_AUTH_MODE": "operator's"}
    prepare_environment(first, is_embedded=True)
    prepare_environment(second, is_embedded=True)
    prepare_environment(joined, is_embedded=False)
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert "RAY_AUTH_TOKEN_PATH" not in first
    assert joined == {"RAY_AUTH_MODE": "operator's", "RAY_USAGE_STATS_ENABLED": "0"}


def test_conductors_are_not_background_work_unless_the_operator_says_so() -> None:
    environ, chosen = dict[str, str](), {"RAY_worker_niceness": "5"}
    prepare_environment(environ, is_embedded=True)
    prepare_environment(chosen, is_embedded=True)
    assert environ["RAY_worker_niceness"] == "0"
    assert chosen["RAY_worker_niceness"] == "5"
