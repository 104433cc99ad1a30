"""``paceline generate``: text from a deployment that runs, or from one started for this call.

Responsible for: choosing the deployment, printing text as it comes, and the figures at the end. Deliberately does not
know: how a deployment is started (:mod:`paceline.cli.launch`). Called by :mod:`paceline.cli.app`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli.figures import comparison_line, figures_line
from paceline.client import Chunk, Completion, Message, PacelineClient, RetryPolicy, Started
from paceline.embedded.options import Placement
from paceline.embedded.ports import FIRST_PORT
from paceline.errors import InvalidRequestError, PacelineError
from paceline.models import DEFAULT_MODEL

_PROBE_TIMEOUT_S = 1.0
_NUM_WARM_UP_TOKENS = 16
_MAX_PATH_CHARACTERS = 255


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads standard input.")],
    endpoint: Annotated[
        str | None,
        typer.Option(help="Gateway, host:port. By default a running `paceline up`, else one for this call."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set with this mass.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the likeliest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="Answer with JSON of this schema: a file, or the schema itself.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")] = False,
    regex: Annotated[str | None, typer.Option(help="The whole answer matches this expression.")] = None,
    grammar: Annotated[
        str | None,
        typer.Option(help="The answer belongs to this Lark grammar: a file, or the grammar itself."),
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is one of these; may be given again.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System turn before the prompt.")] = None,
    raw: Annotated[
        bool, typer.Option(help="Continue the prompt as it is, without the chat template.")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the model's end token.")] = False,
    speculation: Annotated[bool, typer.Option(help="Use drafts.")] = True,
    compare: Annotated[bool, typer.Option(help="Also decode plainly and compare.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the text alone.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds for each generation.", min=0.1)] = 300.0,
    model: Annotated[str, typer.Option(help="Model of a deployment for this call.")] = DEFAULT_MODEL,
    drafter: Annotated[str | None, typer.Option(help="Drafter of it: a directory.")] = None,
    placement: Annotated[Placement | None, typer.Option(help="Where its drafter runs.")] = None,
    dtype: Annotated[str, typer.Option(help="Its dtype: auto, bfloat16 or float32.")] = "auto",
) -> None:
    """Generate text, stream it, and end with a line of figures."""
    console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    text = sys.stdin.read() if prompt == "-" else prompt
    parameters: dict[str, Any] = {
        "prompt": text if raw else _chat(text, system),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or (),
        "ignore_eos": ignore_eos,
        "json_schema": _file_or_text(json_schema),
        "json_object": json_object,
        "regex": regex,
        "grammar": _file_or_text(grammar),
        "choice": choice or None,
        "timeout_s": timeout_s,
    }
    with (
        _gateway(endpoint, model, drafter, placement, dtype, console) as address,
        PacelineClient(address) as client,
    ):
        if compare:
            _warm_up(client, parameters)
        try:
            completion = _stream(client, parameters, speculation=speculation)
        except InvalidRequestError as error:
            if error.field == "chat":
                raise InvalidRequestError("prompt", f"{error.description}: use --raw") from error
            raise
        if not quiet:
            typer.echo(figures_line(completion.stats, completion.finish_reason))
        if compare:
            parameters["seed"] = completion.seed
            plain = client.complete(**parameters, speculation=False)
            typer.echo(f"plain decoding: {figures_line(plain.stats, plain.finish_reason)}")
            typer.echo(comparison_line(completion, plain))


def _file_or_text(value: str | None) -> str | None:
    """What a file holds, where the value names one; a schema or a grammar is hardly ever the name of a file."""
    if value is None or "\n" in value or "{" in value or len(value) > _MAX_PATH_CHARACTERS:
        return value
    path = Path(value)
    return path.read_text(encoding="utf-8") if path.is_file() else value


def _chat(text: str, system: str | None) -> list[Message]:
    turns: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*turns, {"role": "user", "content": text}]


@contextlib.contextmanager
def _gateway(
    endpoint: str | None,
    model: str,
    drafter: str | None,
    placement: Placement | None,
    dtype: str,
    console: Console,
) -> Iterator[str]:
    """Address of a gateway, started for this block if none runs."""
    running_endpoint = f"127.0.0.1:{FIRST_PORT}"
    if endpoint is not None:
        yield endpoint
    elif _answers(running_endpoint):
        yield running_endpoint
    else:
        from paceline.cli import deployment_flags
        from paceline.cli.launch import running

        options = deployment_flags.read(
            console,
            model=model,
            drafter=drafter,
            placement=placement,
            dtype=dtype,
            device="cpu",
            drafter_device="cpu",
            verifier_cores=None,
            drafter_cores=None,
            draft_length=None,
            log_dir=None,
            start_timeout_s=180.0,
            ports=None,
        )
        console.print("no deployment runs here: starting one for this call (`paceline up` keeps one running)")
        with running(options, console) as deployment:
            console.print(f"pinned: {'; '.join(deployment.plan.describe())}", markup=False)
            yield deployment.gateway_endpoint


def _answers(endpoint: str) -> bool:
    with PacelineClient(endpoint, retry=RetryPolicy(max_attempts=1)) as client:
        try:
            client.model_info(timeout_s=_PROBE_TIMEOUT_S)
        except PacelineError:
            return False
    return True


def _warm_up(client: PacelineClient, parameters: dict[str, Any]) -> None:
    """A few tokens each way, so that neither side of a comparison pays for first-time work."""
    short = {**parameters, "max_tokens": min(_NUM_WARM_UP_TOKENS, parameters["max_tokens"])}
    for uses_drafts in (True, False):
        client.complete(**short, speculation=uses_drafts)


def _stream(client: PacelineClient, parameters: dict[str, Any], *, speculation: bool) -> Completion:
    """Prints text as it comes."""
    events = []
    for event in client.generate(**parameters, speculation=speculation):
        events.append(event)
        if isinstance(event, Chunk):
            sys.stdout.write(event.text)
            sys.stdout.flush()
        elif not isinstance(event, Started):
            sys.stdout.write("\n")
    return Completion.from_events(events)
