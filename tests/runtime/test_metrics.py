"""Every metric that is declared is set by some process, and documented; nothing else is documented."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from orchestrator.counters import StatusCollector
from services.runtime import metrics

ROOT = Path(__file__).parents[2]
DECLARED = [name for name, value in vars(metrics).items() if isinstance(value, MetricWrapperBase)]


def exposed_names(families: Iterable[Metric]) -> set[str]:
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_metric_is_set_by_some_process(name: str) -> None:
    own = ROOT / "services" / "runtime" / "metrics.py"
    files = [path for folder in ("services", "orchestrator") for path in (ROOT / folder).rglob("*.py")]
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in files if path != own)


def test_the_metrics_page_lists_every_metric() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    ours = [f for f in metrics.REGISTRY.collect() if f.name.startswith(("vllm:", "paceline_"))]
    assert documented == exposed_names(ours) | exposed_names(StatusCollector(lambda: ()).collect())
