"""Settings of a server process: one model, read once at start.

Responsible for: the fields every server has, and `load`, which merges flags, environment, an optional TOML
file and defaults (in this order of precedence) and refuses unknown keys and values that do not parse. Each
service subclasses `ServerSettings` with its own fields and an ``env_prefix``.

Deliberately does not know: what any service does with its fields. Nothing below a ``__main__`` reads the
environment.
"""

from __future__ import annotations

import argparse
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from paceline import __version__


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _off_is_none(value: object) -> object:
    return None if value in ("", "off") else value


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]
"""A tuple of strings, written ``a,b,c`` in flags, environment and files (a TOML list works too)."""

Port = Annotated[int, Field(ge=0, le=65535)]
"""A TCP port; 0 asks the system for a free one."""

OptionalPort = Annotated[Port | None, BeforeValidator(_off_is_none)]
"""A TCP port, or ``off``."""


class ServerSettings(BaseSettings):
    """Fields that every server process has. Subclasses set ``env_prefix`` and the default ports."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), validate_default=True, hide_input_in_errors=True
    )
    service_link_hint: ClassVar[str] = (
        "this looks like a variable that Kubernetes made for a Service of the same name; "
        "set enableServiceLinks: false"
    )

    config: Path | None = Field(None, description="TOML file with any of these settings, snake_case keys")
    host: str = Field("127.0.0.1", description="address to listen on, for gRPC and metrics")
    port: Port = Field(0, description="gRPC port; 0 picks a free one")
    metrics_port: OptionalPort = Field(None, description="Prometheus port; 0 picks a free one, off for none")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe line logged"
    )
    log_json: bool = Field(True, description="log JSON lines rather than text for people")
    drain_s: float = Field(
        10.0, ge=0, le=3600, description="most seconds to finish admitted work after SIGTERM"
    )
    ready_file: Path | None = Field(
        None, description="JSON file with pid and bound ports, written once ready"
    )
    tls_cert: Path | None = Field(None, description="PEM certificate chain of this process")
    tls_key: Path | None = Field(None, description="PEM private key of this process")
    tls_ca: Path | None = Field(None, description="PEM authorities that peers must be signed by (mutual TLS)")
    reflection: bool = Field(True, description="serve gRPC reflection")

    @model_validator(mode="after")
    def _check_tls(self) -> ServerSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("tls_ca needs tls_cert and tls_key")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then the file named by either of them."""
        path = init_settings().get("config") or env_settings().get("config")
        if path is None:
            return (init_settings, env_settings)
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=Path(path)))

    def masked(self) -> dict[str, Any]:
        """The effective settings for a log line: secrets and passwords within URLs are masked."""
        return {name: _mask(value) for name, value in self.model_dump(mode="json").items()}


SettingsT = TypeVar("SettingsT", bound=ServerSettings)


def load(
    settings_class: type[SettingsT], argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> SettingsT:
    """Read the settings of a process; called by each ``__main__``.

    Precedence: flag > environment > file > default. An unknown flag, an unknown variable under the class's
    prefix, an unknown key in the file or a value that does not parse ends the process with status 2 and a
    message naming it.

    Args:
        settings_class: the service's settings.
        argv: arguments without the program name.
        environ: what is checked for unknown variables; the process environment by default.
    """
    prefix = str(settings_class.model_config.get("env_prefix", ""))
    parser = _parser(settings_class, prefix)
    flags = vars(parser.parse_args(list(argv)))
    for problem in _unknown_variables(settings_class, prefix, os.environ if environ is None else environ):
        parser.error(problem)
    path = flags.get("config") or (os.environ if environ is None else environ).get(f"{prefix}CONFIG")
    if path is not None and not Path(path).is_file():
        parser.error(f"config: no such file: {path}")
    try:
        return settings_class(**flags)
    except ValidationError as error:
        parser.error("; ".join(_describe(settings_class, problem) for problem in error.errors()))
    except ValueError as error:  # a TOML file or a value of the environment that does not parse at all
        parser.error(str(error))


def _parser(settings_class: type[ServerSettings], prefix: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prefix.rstrip("_").lower().replace("_", "-") or None,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description=(settings_class.__doc__ or "").strip().splitlines()[0],
    )
    parser.add_argument("--version", action="version", version=__version__)
    for name, field in settings_class.model_fields.items():
        flag = "--" + name.replace("_", "-")
        default = (
            "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)}"
        )
        text = f"{field.description or ''} ({default}; env {prefix}{name.upper()})".replace("%", "%%")
        if _is_bool(field.annotation):
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(flag, dest=name, metavar=name.upper(), help=text)
    return parser


def _is_bool(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set(typing.get_args(annotation)) == {bool, type(None)}
    return annotation is bool


def _unknown_variables(
    settings_class: type[ServerSettings], prefix: str, environ: Mapping[str, str]
) -> typing.Iterator[str]:
    if not prefix:
        return
    for key in sorted(environ):
        if not key.upper().startswith(prefix.upper()):
            continue
        name = key[len(prefix) :].lower()
        is_link = bool(re.match(r"(service_host|service_port|port_\d+_)", name)) or "tcp://" in environ[key]
        if name not in settings_class.model_fields or (name == "port" and is_link):
            hint = f"; {settings_class.service_link_hint}" if is_link else ""
            yield f"{key}: unknown setting{hint}"


def _describe(settings_class: type[ServerSettings], problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or settings_class.__name__
    reason = "unknown setting" if problem["type"] == "extra_forbidden" else problem["msg"]
    return f"{where}: {reason}"


def _mask(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return str(value)
    if isinstance(value, str) and "://" in value:
        parts = urlsplit(value)
        if parts.password is not None:
            user = parts.username or ""
            host = parts.netloc.rpartition("@")[2]
            return urlunsplit(parts._replace(netloc=f"{user}:***@{host}"))
    return value
