"""``paceline train METHOD``: trains a drafter for a target.

One command for each method that can be trained, with the trainer's options and the method's own. It names no method.
:mod:`paceline.cli.app` imports it only when it is called, because it needs torch.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from paceline.cli.dataclass_options import command_for
from paceline.cli.logs import configure_cli_logs
from paceline.methods.registry import METHODS, training_recipe
from paceline.models import resolve
from paceline.training import trainer


class _MethodCommand(TyperCommand):
    """Refuses another method's flags, and names its own."""

    own_flags = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for parameter in self.get_params(ctx) for flag in parameter.opts}
        for word in args:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known:
                ctx.fail(
                    f"No such option: {flag}. {self.name} has, beside those of every run: {self.own_flags}"
                )
        return super().parse_args(ctx, args)


class TrainGroup(TyperGroup):
    """A command for each method; the method is imported when its command is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Methods that can be trained."""
        return [name for name, method in METHODS.items() if method.recipe is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A method's command; raises TrainingDataError if there is no such method."""
        recipe = training_recipe(cmd_name)

        def run(options: trainer.TrainOptions, own: Any) -> None:
            configure_cli_logs()
            typer.echo(str(trainer.run(options, recipe, own)))

        function = command_for(
            (trainer.TrainOptions, recipe.options),
            run,
            converters={"model_dir": resolve},
            help_text=f"Train a {cmd_name} drafter; an existing run continues from its newest checkpoint.",
        )
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name, cls=_MethodCommand)(function)
        command = get_command(single)
        assert isinstance(command, _MethodCommand)
        own = recipe.options.__dataclass_fields__
        command.own_flags = ", ".join("--" + name.replace("_", "-") for name in own)
        return command


train = typer.Typer(cls=TrainGroup, add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@train.callback()
def _train() -> None:
    """Train a drafter for a target."""
