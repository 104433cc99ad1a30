"""Settings: precedence, refusals, masking."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.runtime.settings import CommaList, OptionalPort, ServerSettings, load


class ExampleSettings(ServerSettings):
    """An example."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_EXAMPLE_")
    metrics_port: OptionalPort = Field(9100, description="metrics")
    peers: CommaList = Field((), description="host:port, ...")
    threads: int | None = Field(None, ge=1, description="threads")
    model: str = Field("m", description="model")
    url: str = Field("", description="url")


def set_env(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"PACELINE_EXAMPLE_{name}", value)


def test_precedence_is_flag_env_file_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "example.toml"
    config.write_text('port = 1\nthreads = 1\nmodel = "file"\npeers = ["a:1", "b:2"]\n')
    assert load(ExampleSettings, []).model == "m"
    set_env(monkeypatch, CONFIG=str(config))
    assert load(ExampleSettings, []).port == 1
    set_env(monkeypatch, PORT="2", THREADS="2")
    settings = load(ExampleSettings, ["--port", "3"])
    assert (settings.port, settings.threads, settings.model) == (3, 2, "file")
    assert settings.peers == ("a:1", "b:2")
    other = tmp_path / "other.toml"
    other.write_text('model = "other"\n')
    assert load(ExampleSettings, ["--config", str(other)]).model == "other"


def test_flags_are_kebab_case_and_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(
        ExampleSettings,
        ["--peers", "a:1, b:2", "--no-reflection", "--metrics-port", "off", "--drain-s", "2.5", "--log-json"],
    )
    assert settings.peers == ("a:1", "b:2")
    assert settings.reflection is False
    assert settings.log_json is True
    assert settings.metrics_port is None
    assert settings.drain_s == 2.5
    set_env(monkeypatch, PEERS="c:3", REFLECTION="false")
    assert load(ExampleSettings, []).peers == ("c:3",)
    assert load(ExampleSettings, []).reflection is False


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--prot", "1"], {}, "--prot"),
        (["--port", "65536"], {}, "port"),
        (["--port", "x"], {}, "port"),
        (["--threads", "0"], {}, "threads"),
        (["--log-level", "loud"], {}, "log_level"),
        (["--config", "/nowhere.toml"], {}, "/nowhere.toml"),
        (["--tls-cert", "a.pem"], {}, "tls_cert and tls_key"),
        ([], {"THREDS": "2"}, "PACELINE_EXAMPLE_THREDS"),
        ([], {"PORT": "tcp://10.0.0.1:50051"}, "enableServiceLinks"),
        ([], {"SERVICE_HOST": "10.0.0.1"}, "enableServiceLinks"),
        ([], {"DRAIN_S": "nan"}, "drain_s"),
    ],
)
def test_what_does_not_parse_ends_the_process_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    environ: dict[str, str],
    named: str,
) -> None:
    set_env(monkeypatch, **environ)
    with pytest.raises(SystemExit) as caught:
        load(ExampleSettings, argv)
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("text", ["prot = 1\n", "port = [\n", 'port = "x"\n'])
def test_bad_files_end_the_process(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    config = tmp_path / "bad.toml"
    config.write_text(text)
    with pytest.raises(SystemExit) as caught:
        load(ExampleSettings, ["--config", str(config)])
    assert caught.value.code == 2
    assert capsys.readouterr().err


def test_passwords_in_urls_are_masked() -> None:
    settings = load(ExampleSettings, ["--url", "redis://user:hunter2@redis:6379/0"])
    assert settings.masked()["url"] == "redis://user:***@redis:6379/0"
    assert "hunter2" not in str(settings.masked())
