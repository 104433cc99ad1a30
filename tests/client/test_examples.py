"""The examples of the documentation run as they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from tests.gateway.scripted_conductor import Script
from tests.gateway.server_thread import Serve
from tests.gateway.tiny_model import byte_level_tokenizer

ROOT = Path(paceline.__file__).parent.parent
TEXT = "hello wörld"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "generate_sync.py",
            [TEXT, "tokens per target pass]", "same text: True", "refused: sampling.temperature"],
        ),
        ("sampling.py", [f"seed 9: {TEXT!r}", ", rank ", "nats"]),
        ("generate_async.py", [f"'One, two, three,' -> {TEXT!r} (length)", "ended after 3 chunks"]),
    ],
)
def test_example(serve: Serve, name: str, expected: list[str]) -> None:
    served = serve(Script(byte_level_tokenizer().encode(TEXT).ids))
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "examples" / name), served.endpoint],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    for text in expected:
        assert text in done.stdout
