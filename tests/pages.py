"""The pages of the documentation and the fenced blocks on them.

Responsible for: reading blocks, and the marks on blocks that need more than one ordinary machine. Deliberately does not
know: how a block is run. Used by `tests/test_docs.py` and `tests/integration/test_pages.py`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "helm" / "paceline" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
NEEDS = {
    "hours": "hours",
    "gpu": "a GPU",
    "cluster": "a cluster",
    "docker": "Docker",
    "hub": "a model hub",
    "files": "files of yours",
    "checkout": "a checkout",
}
"""Words of a mark on a fence (```console needs=hours,gpu), and how the line above the fence says them."""

SHELL = ("console", "sh", "bash")
_FENCE = re.compile(r"(?ms)^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$")
_SENTENCE = re.compile(r"\*Needs ([^:.*]+)(?:: [^*]+)?\.\*")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: where it is.
        line: of its fence, from 1.
        language: the first word behind the fence; empty for a diagram or a formula.
        needs: words of its mark; empty if it runs on one ordinary machine.
        sentence: what the line above the fence says that it needs; empty if that line is no such sentence.
        text: without the fence and without its indent.
    """

    page: Path
    line: int
    language: str
    needs: tuple[str, ...]
    sentence: str
    text: str

    @property
    def is_code(self) -> bool:
        """Whether a reader would run it."""
        return self.language in (*SHELL, "python")

    @property
    def commands(self) -> list[str]:
        """Logical lines of a shell block, without indent; those that name a loop's variable, once for each value."""
        lines = self.text.replace("\\\n", " ").splitlines() if self.language in SHELL else []
        found = [line.strip() for line in lines if line.strip()]
        for variable, values in re.findall(r"^ *for (\w+) in ([^;\n]+);", self.text, re.MULTILINE):
            found = [
                line.replace(f"${variable}", value)
                for line in found
                for value in (values.split() if f"${variable}" in line else ("",))
            ]
        return found

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        language, *marks = fence["info"].split() or [""]
        above = text[: fence.start()].rstrip().rpartition("\n\n")[2]
        sentence = _SENTENCE.fullmatch(" ".join(above.split()))
        found.append(
            Block(
                page,
                text[: fence.start()].count("\n") + 1,
                language,
                tuple(word for mark in marks for word in mark.removeprefix("needs=").split(",")),
                sentence[1] if sentence else "",
                textwrap.dedent(fence["text"]),
            )
        )
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
