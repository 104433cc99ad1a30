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

from paceline.cli.biases import read_biases
from paceline.cli.log_probs import log_prob_lines
from paceline.cli.stats import comparison_line, stats_line
from paceline.client import Chunk, Completion, Event, Finished, Message, PacelineClient, RetryPolicy
from paceline.contract.errors import InvalidRequestError, PacelineError
from paceline.embedded.options import Placement
from paceline.embedded.ports import FIRST_PORT
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
    mode: Annotated[
        str | None,
        typer.Option(
            help="How drafts are verified; `paceline modes` lists them. By default the temperature decides."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 makes tokens of prompt and text less likely.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken from the logit of each token that the text has.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Taken once for each time that the text has it.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=VALUE", help="Added to a token's logit; may be given again."),
    ] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="Never say this text; may be given again.")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Do not end before so many tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="End after this token; may be given again.")
    ] = None,
    log_probs: Annotated[
        int | None,
        typer.Option(
            "--logprobs", help="Print each token's log-probability and so many likeliest tokens beside it."
        ),
    ] = None,
    num_choices: Annotated[
        int, typer.Option("--n", help="Completions; the one with index i has the seed plus i.")
    ] = 1,
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
    max_draft_tokens: Annotated[
        int | None, typer.Option(help="Draft at most so many tokens at a time.", min=1, max=64)
    ] = None,
    use_drafter: Annotated[
        str, typer.Option(help="Name, method or endpoint of the drafter to use; any by default.")
    ] = "",
    reads_features: Annotated[
        bool | None,
        typer.Option(help="Draft with the target's features, or without; the drafter's own way by default."),
    ] = None,
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
        "mode": mode,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": read_biases(logit_bias or ()),
        "bad_words": bad_word or (),
        "min_tokens": min_tokens,
        "stop": stop or (),
        "stop_token_ids": stop_token_id or (),
        "log_probs": log_probs,
        "ignore_eos": ignore_eos,
        "json_schema": _file_or_text(json_schema),
        "json_object": json_object,
        "regex": regex,
        "grammar": _file_or_text(grammar),
        "choice": choice or None,
        "max_draft_tokens": max_draft_tokens,
        "drafter": use_drafter,
        "reads_features": reads_features,
        "timeout_s": timeout_s,
    }
    if compare and num_choices != 1:
        raise InvalidRequestError("n", "--compare takes one completion")
    with (
        _gateway(endpoint, model, drafter, placement, dtype, console) as address,
        PacelineClient(address) as client,
    ):
        if compare:
            _warm_up(client, parameters)
        try:
            if num_choices == 1:
                completion = _stream(client, parameters, speculation=speculation)
            else:
                _choices(client, parameters | {"speculation": speculation}, num_choices, quiet=quiet)
                return
        except InvalidRequestError as error:
            if error.field == "chat":
                raise InvalidRequestError("prompt", f"{error.description}: use --raw") from error
            raise
        if not quiet:
            _print_stats(completion)
        if compare:
            parameters["seed"] = completion.seed
            plain = client.complete(**parameters, speculation=False)
            typer.echo(f"plain decoding: {stats_line(plain.stats, plain.finish_reason)}")
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
            ngram_tokens=None,
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


def _print_stats(completion: Completion) -> None:
    for line in log_prob_lines(completion):
        typer.echo(line)
    typer.echo(stats_line(completion.stats, completion.finish_reason))
    if not completion.is_exact:
        typer.echo("this mode is not exact: the target alone would write other texts", err=True)


def _choices(client: PacelineClient, parameters: dict[str, Any], num_choices: int, *, quiet: bool) -> None:
    """Prints each choice as it ends, since they are written at the same time."""
    by_choice: dict[int, list[Event]] = {}
    for event in client.generate(**parameters, n=num_choices):
        by_choice.setdefault(event.index, []).append(event)
        if not isinstance(event, Finished):
            continue
        completion = Completion.from_events(by_choice.pop(event.index))
        if not quiet:
            typer.echo(f"choice {event.index}, seed {completion.seed}:")
        typer.echo(completion.text)
        if not quiet:
            _print_stats(completion)


def _stream(client: PacelineClient, parameters: dict[str, Any], *, speculation: bool) -> Completion:
    """Prints text as it comes."""
    events = []
    for event in client.generate(**parameters, speculation=speculation):
        events.append(event)
        if isinstance(event, Chunk):
            sys.stdout.write(event.text)
            sys.stdout.flush()
        elif isinstance(event, Finished):
            sys.stdout.write("\n")
    return Completion.from_events(events)
