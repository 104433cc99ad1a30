"""A command whose options are the fields of one dataclass, or of several.

Reads names, types, defaults and the ``Attributes:`` section of an options class, so that training options are written
once. Used by ``paceline train`` and ``paceline data``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer


def command_for(
    options_class: type[Any] | tuple[type[Any], ...],
    run: Callable[..., None],
    *,
    arguments: Iterable[str] = (),
    converters: dict[str, Callable[[Any], Any]] | None = None,
    help_text: str = "",
) -> Callable[..., None]:
    """Make a function that typer turns into a command.

    Args:
        options_class: a dataclass, or several without a common field.
        run: gets an instance of each.
        arguments: fields that are positional.
        converters: applied to the values of fields before the class gets them.
        help_text: first line of the command's help.
    """
    classes = options_class if isinstance(options_class, tuple) else (options_class,)
    hints = {name: hint for one in classes for name, hint in typing.get_type_hints(one).items()}
    texts = {name: text for one in classes for name, text in attribute_texts(one).items()}
    names = [[item.name for item in dataclasses.fields(one)] for one in classes]
    positional = tuple(arguments)
    parameters, kinds = [], {}
    for item in (item for one in classes for item in dataclasses.fields(one)):
        hint = hints[item.name]
        kinds[item.name] = typing.get_origin(hint)
        info: Any = typer.Argument if item.name in positional else typer.Option
        default = _default(item)
        parameters.append(
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[_command_type(hint), info(help=texts.get(item.name, ""))],
            )
        )

    def command(**values: Any) -> None:
        for name, convert in (converters or {}).items():
            values[name] = convert(values[name])
        for name, value in values.items():
            if kinds[name] is tuple and value is not None:
                values[name] = tuple(value)
        run(*(one(**{name: values[name] for name in own}) for one, own in zip(classes, names, strict=True)))

    command.__doc__ = help_text
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def attribute_texts(options_class: type) -> dict[str, str]:
    """Texts of the ``Attributes:`` sections of a class's docstring and of those that it inherits from."""
    texts: dict[str, str] = {}
    for one in reversed(options_class.__mro__):
        texts |= _section_texts(inspect.cleandoc(one.__doc__ or ""))
    return texts


def _section_texts(docstring: str) -> dict[str, str]:
    section = docstring.partition("Attributes:\n")[2]
    texts: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        match = re.match(r"    (\w+): (.*)", line)
        if match:
            name = match[1]
            texts[name] = match[2].replace("``", "")
        elif name and line.startswith("        "):
            texts[name] += " " + line.strip().replace("``", "")
        elif line.strip():
            break
    return texts


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default is not dataclasses.MISSING:
        default = item.default
    elif item.default_factory is not dataclasses.MISSING:
        default = item.default_factory()
    else:
        return inspect.Parameter.empty
    return list(default) if isinstance(default, tuple) else default


def _command_type(hint: Any) -> Any:
    """The type that typer knows for a field's type: tuples of one type become repeated options."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return list[arguments[0]]  # type: ignore[valid-type]  # known at run time only
    if origin in (typing.Union, types.UnionType):
        inner = next(argument for argument in arguments if argument is not type(None))
        return typing.Optional[_command_type(inner)]  # noqa: UP045 (built at run time)
    return hint if hint in (int, float, str, bool, Path) else str
