"""Options written once, as a dataclass, become a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer
from typer.testing import CliRunner

from paceline.cli.dataclass_options import attribute_texts, command_for


@dataclass(frozen=True)
class RideOptions:
    """Options of a ride.

    Attributes:
        road: where to, a
            long way.
        gears: how many.
        is_wet: whether it rains.
        stops: on the way.
        bike: absent takes ``any``.
    """

    road: Path
    gears: int = 7
    is_wet: bool = False
    stops: tuple[str, ...] = ("cafe",)
    bike: str | None = None


def make() -> tuple[typer.Typer, list[RideOptions]]:
    seen: list[RideOptions] = []
    app = typer.Typer(rich_markup_mode=None)
    converters = {"road": lambda path: Path("/roads") / path}
    app.command()(
        command_for(RideOptions, seen.append, arguments=("road",), converters=converters, help_text="Ride.")
    )
    return app, seen


def test_values_and_defaults() -> None:
    app, seen = make()
    result = CliRunner().invoke(app, ["north", "--gears", "3", "--is-wet", "--stops", "a", "--stops", "b"])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, ["south"]).exit_code == 0
    assert seen == [RideOptions(Path("/roads/north"), 3, True, ("a", "b")), RideOptions(Path("/roads/south"))]


def test_help_comes_from_the_docstring() -> None:
    app, _ = make()
    output = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "Ride." in output
    assert "where to, a long way." in output
    assert "absent takes any." in output


def test_bad_values_are_refused() -> None:
    app, seen = make()
    assert CliRunner().invoke(app, ["north", "--gears", "many"]).exit_code == 2
    assert seen == []


def test_no_attributes_section() -> None:
    assert attribute_texts(type("Bare", (), {})) == {}
