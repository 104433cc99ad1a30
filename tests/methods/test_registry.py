"""The registry: what methods declare agrees with the parts that they name, and needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.methods.method import load_reference
from paceline.methods.registry import METHODS, register, training_recipe


@pytest.mark.parametrize("name", METHODS)
def test_a_method_s_parts_are_there_and_have_its_name(name: str) -> None:
    method = METHODS[name]
    assert method.name == name
    assert method.drafter_class().method == name
    assert method.formats[0] == "paceline"
    for layout, reference in method.layouts.items():
        assert load_reference(reference).name == layout
    assert method.reads
    assert 0 < method.ahead_fraction <= 1
    assert training_recipe(name).options()


def test_the_registry_imports_nothing_heavy() -> None:
    code = (
        "import sys; import paceline.methods.registry; "
        "print([name for name in ('torch', 'transformers', 'numpy', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_a_name_stands_for_one_method(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("methods")
    (folder / "second_eagle.py").write_text(
        "from paceline.methods.method import Method\n"
        'METHOD = Method("eagle3", "nothing", "second_eagle:Drafter", is_one_pass=False)\n'
    )
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ValueError, match="'eagle3' is registered already"):
        register("second_eagle")
    assert register("paceline.methods.eagle3") is METHODS["eagle3"]
