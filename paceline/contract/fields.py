"""Checks of request fields: plain values in, an `InvalidRequestError` that names the field out.

Every process edge checks what it receives, because its peers are not trusted. Gateway, conductor, verifier and
drafter call these functions on their own messages, so that each rule is written once. A check that returns has passed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from paceline.contract import limits
from paceline.contract.errors import InvalidRequestError

_TENANT = re.compile(rf"[A-Za-z0-9_.-]{{0,{limits.MAX_TENANT_CHARACTERS}}}")


def check_number(
    field: str, value: object, low: float, high: float, *, unit: str = "", is_low_allowed: bool = True
) -> None:
    """Refuse what is not a finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(field, f"must be a number, got {value!r}")
    is_inside = low <= value <= high if is_low_allowed else low < value <= high
    if not is_inside or not math.isfinite(value):
        bounds = f"from {low} to {high}" if is_low_allowed else f"above {low} and at most {high}"
        if math.isinf(high):
            bounds = f"finite and at least {low}"
        raise InvalidRequestError(field, f"must be {bounds}{unit and ' '}{unit}, got {value!r}")


def check_integer(field: str, value: object, low: int, high: int, unit: str = "") -> None:
    """Refuse what is not an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(field, f"must be an integer, got {value!r}")
    check_number(field, value, low, high, unit=unit)


def check_count(field: str, count: int, most: int, what: str) -> None:
    """Refuse a list that is too long."""
    if count > most:
        raise InvalidRequestError(field, f"has {count} {what}, at most {most} are possible")


def check_length(field: str, text: str, least: int, most: int) -> None:
    """Refuse a text that is too short or too long, in characters."""
    if not least <= len(text) <= most:
        raise InvalidRequestError(field, f"must have {least} to {most} characters, has {len(text)}")


def check_token_id(field: str, token_id: int, vocab_size: int) -> None:
    """Refuse a token that the model does not have."""
    if token_id >= vocab_size:
        raise InvalidRequestError(field, f"{token_id} is outside the vocabulary of {vocab_size} tokens")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse tokens that the model does not have; the error names the first of them."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        check_token_id(f"{field}[{index}]", token_ids[index], vocab_size)


def check_prompt(field: str, token_ids: Sequence[int], vocab_size: int, max_positions: int) -> None:
    """Refuse a prompt that is empty, leaves no position for a completion, or has tokens outside the vocabulary."""
    if not token_ids:
        raise InvalidRequestError(field, "must not be empty")
    if len(token_ids) >= max_positions:
        raise InvalidRequestError(
            field,
            f"has {len(token_ids)} tokens; the model holds {max_positions} of prompt and completion together",
        )
    check_token_ids(field, token_ids, vocab_size)


def check_new_tokens(
    max_new_tokens: int, num_resumed_tokens: int, num_prompt_tokens: int, max_positions: int
) -> None:
    """Refuse a token limit that is out of range, or resumed tokens that leave no prompt or nothing to generate.

    Args:
        max_new_tokens: most tokens to generate, resumed ones included.
        num_resumed_tokens: tokens at the end of the prompt that were generated before.
        num_prompt_tokens: tokens of the prompt, resumed ones included.
        max_positions: positions of the model.
    """
    check_integer("max_new_tokens", max_new_tokens, 1, max_positions)
    if num_resumed_tokens >= num_prompt_tokens:
        raise InvalidRequestError("num_resumed_tokens", "must leave at least one token of the prompt")
    if num_resumed_tokens >= max_new_tokens:
        raise InvalidRequestError(
            "num_resumed_tokens", f"must be below max_new_tokens, {max_new_tokens}, got {num_resumed_tokens}"
        )


def check_stop_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse too many stop tokens, or stop tokens outside the vocabulary."""
    check_count(field, len(token_ids), limits.MAX_STOP_TOKENS, "tokens")
    check_token_ids(field, token_ids, vocab_size)


def check_log_prob_counts(num_top: int, num_prompt_top: int, vocab_size: int) -> None:
    """Refuse more alternatives beside each token than the limit or the vocabulary allows."""
    most = min(limits.MAX_TOP_LOG_PROBS, vocab_size)
    check_integer("log_probs.num_top", num_top, 0, most)
    check_integer("log_probs.num_prompt_top", num_prompt_top, 0, most)


def check_tenant(field: str, tenant: str) -> str:
    """The tenant's name, which may be empty."""
    if _TENANT.fullmatch(tenant) is None:
        raise InvalidRequestError(
            field,
            f"must be at most {limits.MAX_TENANT_CHARACTERS} letters, digits, underscores, dots and hyphens",
        )
    return tenant


def can_use_features(is_wanted: bool | None, *, has_tap: bool, is_tap_optional: bool) -> bool:
    """Whether a drafter can draft with the target's features, or without them, as a request wants it.

    Args:
        is_wanted: None leaves it to the drafter's method.
        has_tap: the drafter reads features.
        is_tap_optional: the drafter also drafts without them.
    """
    if is_wanted is None:
        return True
    return has_tap if is_wanted else not has_tap or is_tap_optional


def check_reads_features(
    is_wanted: bool | None, *, has_tap: bool, is_tap_optional: bool, drafter: str
) -> bool:
    """Whether a sequence reads features; refuse what the drafter cannot do."""
    if is_wanted is None:
        return has_tap
    if not can_use_features(is_wanted, has_tap=has_tap, is_tap_optional=is_tap_optional):
        reason = "reads no features" if is_wanted else "cannot draft without features"
        raise InvalidRequestError(
            "reads_features", f"must not be {str(is_wanted).lower()}: {drafter} {reason}"
        )
    return is_wanted
