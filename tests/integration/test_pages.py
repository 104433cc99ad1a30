"""Every command and every example of the documentation runs as it is written, in order, from an empty folder.

A block that needs more than one ordinary machine has a mark (`tests/pages.py`); `tests/test_docs.py` checks those.
"""

from __future__ import annotations

import fcntl
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.embedded import Ports
from tests.integration.page_shell import PageFailure, run_blocks
from tests.pages import BLOCKS, PAGES, ROOT, Block, blocks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TIMEOUT_S = 540.0
RUN = {page: ready for page in PAGES if (ready := [b for b in blocks(page) if b.is_code and not b.needs])}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.fixture(autouse=True)
def default_ports() -> Iterator[None]:
    """The default ports, which the pages name: one page at a time on this machine, and none is in use after it."""
    with (Path(tempfile.gettempdir()) / "paceline-pages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Ports.default().taken() == [], "end the deployment that runs on this machine's default ports"
        yield
        assert Ports.default().taken() == []


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path) -> None:
    folder, state = tmp_path / "folder", tmp_path / "state"
    folder.mkdir()
    state.mkdir()
    for block, printed in zip(RUN[page], run_blocks(RUN[page], folder, state, TIMEOUT_S), strict=True):
        check_printed(block, printed)


def check_printed(block: Block, printed: str) -> None:
    """A comment behind a `print` line shows what is printed: its numbers are the printed ones, rounded."""
    shown = re.findall(r"^ *print\(.*\)  # (.+)$", block.text, re.MULTILINE)
    if block.language != "python" or not shown:
        return
    lines = printed.splitlines()
    assert len(lines) == len(shown), f"{block}: printed {printed}"
    for line, comment in zip(lines, shown, strict=True):
        expected, got = NUMBER.findall(comment), NUMBER.findall(line)
        assert len(expected) == len(got), f"{block}: {line!r} is not like {comment!r}"
        for text, number in zip(expected, got, strict=True):
            places = len(text.partition(".")[2])
            assert round(float(number), places) == float(text), f"{block}: {line!r} is not {comment!r}"


def test_blocks_run_on_many_pages() -> None:
    assert len(RUN) >= 5
    assert sum(map(len, RUN.values())) == len([b for b in BLOCKS if b.is_code and not b.needs])


def a_block(text: str) -> Block:
    return Block(ROOT / "README.md", 1, "sh", (), "", text)


def test_a_failing_command_is_named(tmp_path: Path) -> None:
    folder, state = tmp_path / "folder", tmp_path / "state"
    folder.mkdir()
    state.mkdir()
    with pytest.raises(PageFailure, match=r"(?s)README.md:1: exit 1 of: false.*before"):
        run_blocks([a_block("true\n"), a_block("echo before\nfalse\necho after\n")], folder, state, 20)


def test_a_process_that_is_left_is_ended_and_named(tmp_path: Path) -> None:
    folder, state = tmp_path / "folder", tmp_path / "state"
    folder.mkdir()
    state.mkdir()
    with pytest.raises(PageFailure, match=r"left: .* sleep"):
        run_blocks([a_block("sleep 500 &\n")], folder, state, 20)
