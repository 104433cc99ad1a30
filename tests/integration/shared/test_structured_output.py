"""200 constrained requests in flight together: every text valid, and word for word what plain decoding gives."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from paceline.client import AsyncPacelineClient, Completion
from paceline.contract.errors import InvalidRequestError
from tests.integration.conftest import Site

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_REQUESTS = 200
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "country": {"enum": ["France", "Italy", "Norway", "Japan"]},
        "is_capital": {"type": "boolean"},
    },
    "required": ["name", "country", "is_capital"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCORES = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 99},
    "minItems": 2,
    "maxItems": 4,
}
DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
ANSWERS = ["yes", "no", "it depends on the weather"]


def is_json_of(schema: dict[str, Any]) -> Callable[[str], bool]:
    return lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


FORMS: list[tuple[str, dict[str, Any], Callable[[str], bool]]] = [
    ("A city as JSON: ", {"json_schema": CITY}, is_json_of(CITY)),
    ("A person as JSON: ", {"json_schema": PERSON}, is_json_of(PERSON)),
    ("Some scores: ", {"json_schema": SCORES}, is_json_of(SCORES)),
    ("She was born on ", {"regex": DATE}, lambda text: re.fullmatch(DATE, text) is not None),
    ("Will it rain? The answer is: ", {"choice": ANSWERS}, ANSWERS.__contains__),
]


def parameters(which: int) -> dict[str, Any]:
    """Half of each form greedy, half sampled, every one with a prompt and a seed of its own."""
    prompt, constraint, _ = FORMS[which % len(FORMS)]
    is_sampled = which // len(FORMS) % 2 == 1
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": which} if is_sampled else {"temperature": 0.0}
    return {"prompt": f"{which}. {prompt}", "max_tokens": 64, **constraint, **sampling}


def run_all(together: Site, *, speculation: bool) -> tuple[list[Completion], list[BaseException]]:
    """All requests at once, with two beside them that cannot be honoured."""
    bad = [
        {"prompt": "x", "grammar": "start: ("},
        {
            "prompt": "x",
            "grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(4000)) + '\na4000: "x"',
        },
    ]

    async def run() -> list[Any]:
        async with AsyncPacelineClient(together.deployment.gateway_endpoint) as client:
            asked = [parameters(which) for which in range(NUM_REQUESTS)]
            asked[NUM_REQUESTS // 2 : NUM_REQUESTS // 2] = bad
            calls = (client.complete(**one, speculation=speculation, timeout_s=400) for one in asked)
            return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(run())
    refused = outcomes[NUM_REQUESTS // 2 : NUM_REQUESTS // 2 + len(bad)]
    del outcomes[NUM_REQUESTS // 2 : NUM_REQUESTS // 2 + len(bad)]
    return outcomes, refused


def test_200_together_are_valid_and_the_same_without_drafts(together: Site) -> None:
    drafted, refused = run_all(together, speculation=True)
    for error in refused:
        assert isinstance(error, InvalidRequestError)
        assert error.field == "sampling.constraint.grammar"
    failures = [outcome for outcome in drafted if not isinstance(outcome, Completion)]
    assert not failures
    for which, completion in enumerate(drafted):
        assert FORMS[which % len(FORMS)][2](completion.text), (which, completion.text)
        assert completion.finish_reason == "stop"
    assert sum(completion.stats.num_accepted_tokens for completion in drafted) > 0
    assert len({completion.text for completion in drafted}) > NUM_REQUESTS // 8
    plain, _ = run_all(together, speculation=False)
    assert [completion.token_ids for completion in plain] == [completion.token_ids for completion in drafted]


def test_a_text_goes_on_inside_its_grammar_after_a_verifier_restart(together: Site) -> None:
    request = {**parameters(0), "prompt": "Three people as JSON: ", "max_tokens": 120}
    request["json_schema"] = {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 3}
    expected = together.client.complete(**request, speculation=False)
    stream = together.client.generate(**request)
    events = [next(stream), next(stream)]
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: list(stream))
        together.deployment.kill("verifier")
        together.deployment.restart("verifier")
        events += rest.result(timeout=120)
    completion = Completion.from_events(events)
    assert completion.token_ids == expected.token_ids
    jsonschema.validate(json.loads(completion.text), request["json_schema"])
