"""``paceline generate``: text from a running deployment, or from one started for this call.

Responsible for: the flags, and the comparison with plain decoding. Deliberately does not know: how a gateway is found
(:mod:`paceline.cli.gateway`), how text is printed (:mod:`paceline.cli.printing`). Called by :mod:`paceline.cli.app`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli.biases import read_biases
from paceline.cli.gateway import gateway_for
from paceline.cli.printing import print_choices, print_stats, print_stream
from paceline.cli.stats import comparison_line, stats_line
from paceline.client import Message, PacelineClient
from paceline.contract.errors import InvalidRequestError
from paceline.contract.limits import MAX_DRAFT_LENGTH
from paceline.embedded.options import Placement
from paceline.models import DEFAULT_MODEL

_NUM_WARM_UP_TOKENS = 16
_MAX_PATH_CHARACTERS = 255


def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt for the model; - reads standard input.")],
    endpoint: Annotated[
        str | None,
        typer.Option(help="Gateway, host:port. By default a running `paceline up`, else one for this call."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set with this mass.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this fraction of the likeliest.")
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
        float | None, typer.Option(help="Subtracted from the logit of each token that the text contains.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Subtracted once for each time that the text contains it.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=VALUE", help="Added to a token's logit; may be repeated."),
    ] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="Never write this text; may be repeated.")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Do not end before this many tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="End after this token; may be repeated.")
    ] = None,
    log_probs: Annotated[
        int | None,
        typer.Option("--logprobs", help="Print each token's log-probability and this many likeliest tokens."),
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
        list[str] | None, typer.Option(help="The answer is one of these; may be repeated.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System turn before the prompt.")] = None,
    raw: Annotated[
        bool, typer.Option(help="Continue the prompt as it is, without the chat template.")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Continue after the model's end token.")] = False,
    speculation: Annotated[bool, typer.Option(help="Use drafts.")] = True,
    max_draft_tokens: Annotated[
        int | None,
        typer.Option(help="Draft at most this many tokens at a time.", min=1, max=MAX_DRAFT_LENGTH),
    ] = None,
    use_drafter: Annotated[
        str, typer.Option(help="Name, method or endpoint of the drafter to use; any by default.")
    ] = "",
    reads_features: Annotated[
        bool | None,
        typer.Option(help="Draft with or without the target's features; by default the drafter decides."),
    ] = None,
    compare: Annotated[bool, typer.Option(help="Also decode plainly and compare.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the text alone.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds for each generation.", min=0.1)] = 300.0,
    model: Annotated[str, typer.Option(help="Model of a deployment for this call.")] = DEFAULT_MODEL,
    drafter: Annotated[str | None, typer.Option(help="Drafter of it: a directory.")] = None,
    placement: Annotated[Placement | None, typer.Option(help="Where its drafter runs.")] = None,
    dtype: Annotated[str, typer.Option(help="Its dtype: auto, bfloat16 or float32.")] = "auto",
) -> None:
    """Generate text, stream it, and end with a line of stats."""
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
        raise InvalidRequestError("n", "--compare needs a single completion")
    with (
        gateway_for(endpoint, model, drafter, placement, dtype, console) as address,
        PacelineClient(address) as client,
    ):
        if compare:
            _warm_up(client, parameters)
        try:
            if num_choices == 1:
                completion = print_stream(client, parameters, speculation=speculation)
            else:
                print_choices(client, parameters | {"speculation": speculation}, num_choices, quiet=quiet)
                return
        except InvalidRequestError as error:
            if error.field == "chat":
                raise InvalidRequestError("prompt", f"{error.description}: use --raw") from error
            raise
        if not quiet:
            print_stats(completion)
        if compare:
            parameters["seed"] = completion.seed
            plain = client.complete(**parameters, speculation=False)
            typer.echo(f"plain decoding: {stats_line(plain.stats, plain.finish_reason)}")
            typer.echo(comparison_line(completion, plain))


def _file_or_text(value: str | None) -> str | None:
    """The content of a file if the value names one; otherwise the value, which is a schema or a grammar itself."""
    if value is None or "\n" in value or "{" in value or len(value) > _MAX_PATH_CHARACTERS:
        return value
    path = Path(value)
    return path.read_text(encoding="utf-8") if path.is_file() else value


def _chat(text: str, system: str | None) -> list[Message]:
    turns: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*turns, {"role": "user", "content": text}]


def _warm_up(client: PacelineClient, parameters: dict[str, Any]) -> None:
    """Generates a few tokens each way, so that neither side of a comparison pays for first-time work."""
    short = {**parameters, "max_tokens": min(_NUM_WARM_UP_TOKENS, parameters["max_tokens"])}
    for uses_drafts in (True, False):
        client.complete(**short, speculation=uses_drafts)
