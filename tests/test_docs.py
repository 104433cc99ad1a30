"""What the docs name exists: files, folders, definitions, links, imports, commands and their options, on every page."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from experiments.pipeline.measure import Lengths, parse_cycles
from paceline.cli.app import app
from tests.pages import BLOCKS, DOCS, NEEDS, PAGES, ROOT, SHELL, Block

HOPS = sorted((DOCS / "structure").glob("*.md"))
MAP = [DOCS / "structure.md", *HOPS]
SOURCES = [
    path
    for folder in ("paceline", "services", "orchestrator", "experiments")
    for path in (ROOT / folder).rglob("*.py")
    if "v1" not in path.parts
]
PATH = re.compile(r"(?:[\w.-]+/)+(?:[\w.-]+\.(?:py|pyi|md|json|proto|c|h|lua|yaml|toml|png))?|\w+\.py")
FOLDERS = ("paceline", "services", "orchestrator", "experiments", "protos", "tests", "docs", "helm", "deploy")


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text())


def named(*pages: Path) -> list[str]:
    """What stands in backticks on these pages."""
    return [name for page in pages for name in re.findall(r"`([^`\n]+)`", prose(page))]


def is_ours(name: str) -> bool:
    """Whether a name in backticks is the path of a file or folder of this repository."""
    return bool(PATH.fullmatch(name)) and (name.startswith(FOLDERS) or name.endswith((".md", ".py")))


def definitions(path: Path) -> set[str]:
    """The classes and functions of a file, and the methods of its classes as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = (ast.FunctionDef, ast.AsyncFunctionDef)
            names |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, members)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    roots = (ROOT, DOCS, page.parent)
    missing = [
        name
        for name in named(page)
        if is_ours(name) and not any((root / name.rstrip("/")).exists() for root in roots)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", prose(page))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_map_names_many_files() -> None:
    files = [name for name in named(*MAP) if name.endswith(".py")]
    assert len(files) > 40


def test_named_folders_exist() -> None:
    folders = [name for name in named(*MAP) if re.fullmatch(r"[\w/]+/", name)]
    assert len(folders) > 8
    assert [name for name in folders if not (ROOT / name).is_dir()] == []


def test_every_package_is_on_the_map() -> None:
    """A method's own package may be missing: `docs/methods/` has a page for each of these."""
    methods = {path.stem for path in (DOCS / "methods").glob("*.md")}
    packages = [path.parent for path in SOURCES if path.name == "__init__.py"]
    depth = {"paceline": 3, "services": 2, "orchestrator": 1, "experiments": 2}
    names = {
        path.relative_to(ROOT).as_posix() + "/"
        for path in packages
        if len(path.relative_to(ROOT).parts) <= depth[path.relative_to(ROOT).parts[0]]
        and path.name not in methods
    } - {"paceline/", "services/", "experiments/"}
    assert len(names) > 40
    assert sorted(names - set(named(*MAP))) == []


def test_the_map_lists_the_layers_of_the_library_from_the_bottom_up() -> None:
    """A folder imports only folders above it in the table, but for the file that chooses the CPU kernels."""
    rows = re.findall(r"^\| `paceline/(\w+)/` \|", (DOCS / "structure.md").read_text(), re.MULTILINE)
    level = {name: number for number, name in enumerate(rows)}
    assert len(level) > 15
    imported = re.compile(r"^\s*(?:from|import) paceline\.(\w+)", re.MULTILINE)
    wrong = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in SOURCES
        if (own := path.relative_to(ROOT).parts[:2])[0] == "paceline" and own[1] in level
        for module in imported.findall(path.read_text())
        if level.get(module, 0) > level[own[1]] and path.name != "backend.py"
    ]
    assert wrong == []


def test_named_definitions_exist() -> None:
    """Definitions beside a file are in that file; those by themselves are somewhere."""
    pairs = [pair for page in PAGES for pair in re.findall(r"`([\w/]+\.py)` \(`([\w.]+)`\)", prose(page))]
    names = [name for _, name in pairs]
    assert len(names) > 30
    wrong = [
        (path, name)
        for path, name in pairs
        if not (ROOT / path).is_file() or name not in definitions(ROOT / path)
    ]
    assert wrong == []
    text = "\n".join(path.read_text() for path in SOURCES)
    defined = set(re.findall(r"^\s*(?:async )?(?:def|class) (\w+)", text, re.MULTILINE))
    wire = {"GenerationService", "DirectorService", "ConductorService", "SchedulerService"}
    metrics = set(re.findall(r"^\| `(paceline_\w+)`", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    alone = [name for name in named(*MAP) if re.fullmatch(r"[A-Z]\w+\.\w+|_?[a-z]+_[a-z_]+", name)]
    assert len(alone) > 30
    missing = [
        name
        for name in alone
        if name.split(".")[0] not in wire
        and not name.endswith(".md")
        and not set(name.split(".")) <= defined | metrics
    ]
    assert missing == []


@pytest.mark.parametrize("page", HOPS, ids=lambda page: page.name)
def test_a_hop_is_a_short_read(page: Path) -> None:
    files = Counter(name for name in named(page) if name.endswith(".py"))
    assert len(files) <= 11  # ten, and one that the text points at
    assert len(page.read_text().splitlines()) <= 60


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.is_code], ids=str)
def test_a_mark_says_in_words_what_a_block_needs(block: Block) -> None:
    """Readers see the sentence above a fence, and not what follows the backticks."""
    assert set(block.needs) <= set(NEEDS)
    assert block.sentence == " and ".join(NEEDS[word] for word in block.needs)


@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.is_code], ids=str)
def test_a_block_without_a_language_has_no_commands(block: Block) -> None:
    assert block.language in ("", "promql")
    first_words = {line.split()[0] for line in block.text.splitlines() if line.strip()}
    assert not first_words & {"paceline", "python", "make", "helm", "docker", "git", "pip"}


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in SHELL], ids=str)
def test_shell_blocks_parse(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_make_targets_exist_and_ci_runs_those_that_need_a_checkout() -> None:
    """What a page tells to run in a checkout is checked by CI's own steps; `test-quick` is a part of `test`."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = set(re.findall(r"make ([a-z-]+)", (ROOT / ".ci" / "run").read_text())) | {"test-quick"}
    named = [line.split()[1] for block in BLOCKS for line in block.commands if line.split()[:1] == ["make"]]
    assert named
    assert set(named) <= targets & steps
    assert all("checkout" in block.needs for block in BLOCKS if any("make " in c for c in block.commands))


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if re.search(r"\b(?:docker|helm) ", block.text)], ids=str
)
def test_files_of_containers_exist(block: Block) -> None:
    """Paths in commands that this machine cannot run."""
    names = re.findall(r"(?:deploy|helm)/[\w./$-]+", block.text)
    assert names
    assert [name for name in names if not list(ROOT.glob(re.sub(r"\$\w+", "*", name)))] == []


IMPORTS = [pytest.param(block, id=str(block)) for block in BLOCKS if block.language == "python"]


@pytest.mark.parametrize("block", IMPORTS)
def test_examples_import_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


LINES = [(block, line) for block in BLOCKS for line in block.commands]
COMMANDS = [
    pytest.param(line, id=f"{block}: {line[:60]}") for block, line in LINES if line.startswith("paceline ")
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("line", COMMANDS)
def test_named_commands_take_these_options(line: str) -> None:
    arguments = shlex.split(line, comments=True)[1:]
    command = get_command(app)
    context = command.make_context("paceline", arguments)
    while (rest := [*context._protected_args, *context.args]) and hasattr(command, "resolve_command"):
        name, command, arguments = command.resolve_command(context, rest)
        assert command is not None, name
        context = command.make_context(name, arguments, parent=context)


EXPERIMENTS = [
    pytest.param(line, id=f"{block}: {line[:70]}")
    for block, line in LINES
    if line.startswith("python -m experiments.")
]


def test_there_are_experiments() -> None:
    assert len(EXPERIMENTS) > 4


@pytest.mark.parametrize("line", EXPERIMENTS)
def test_named_experiments_take_these_options(line: str) -> None:
    _, _, module, *arguments = shlex.split(line, comments=True)
    name = module.rpartition(".")[2]
    command = typer.Typer(add_completion=False)
    command.command()(getattr(importlib.import_module(f"{module}.__main__"), name))
    context = get_command(command).make_context(name, arguments)
    if name == "pipeline":  # what it makes of its words only shows when it runs
        assert parse_cycles(context.params["cycles"], Lengths())
