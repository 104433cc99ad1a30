"""Sampling parameters, log-probability options and speculation options as they come in messages.

Responsible for: turning the messages into checked plain values, with the defaults that the proto names.
Deliberately does not know: who asks. Called by: gateway, conductor and verifier, which refuse alike, and by the
drafter, which must choose tokens as the verifier does.
"""

from __future__ import annotations

from paceline.contract import limits
from paceline.contract.errors import InvalidRequestError
from paceline.contract.fields import (
    check_integer,
    check_length,
    check_log_prob_counts,
    check_token_id,
    check_token_ids,
)
from paceline.sampling.params import Constraint, ConstraintKind, SamplingParams, VerifyMode
from paceline.v1 import sampling_pb2

_MODES = {
    sampling_pb2.VERIFY_MODE_UNSPECIFIED: None,
    sampling_pb2.VERIFY_MODE_GREEDY: VerifyMode.GREEDY,
    sampling_pb2.VERIFY_MODE_COUPLED: VerifyMode.COUPLED,
    sampling_pb2.VERIFY_MODE_REJECTION: VerifyMode.REJECTION,
    sampling_pb2.VERIFY_MODE_BLOCK: VerifyMode.BLOCK,
    sampling_pb2.VERIFY_MODE_TYPICAL: VerifyMode.TYPICAL,
}


def sampling_params(message: sampling_pb2.SamplingParams, vocab_size: int | None = None) -> SamplingParams:
    """Checked parameters.

    Args:
        message: as received.
        vocab_size: tokens of the model; None skips the comparison of token ids with it.

    Raises:
        InvalidRequestError: naming the field, such as ``sampling.logit_bias[50000]``.
    """
    if message.mode not in _MODES:
        raise InvalidRequestError("sampling.mode", f"{message.mode} is not a verification mode")
    has = message.HasField
    try:
        params = SamplingParams(
            temperature=message.temperature if has("temperature") else 0.0,
            top_k=message.top_k,
            top_p=message.top_p if has("top_p") else 1.0,
            min_p=message.min_p,
            seed=message.seed,
            mode=_MODES[message.mode],
            repetition_penalty=message.repetition_penalty if has("repetition_penalty") else 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple(sorted(message.logit_bias.items())),
            bad_runs=tuple(tuple(run.token_ids) for run in message.bad_runs),
            min_tokens=message.min_tokens,
            typical_epsilon=(
                message.typical_epsilon if has("typical_epsilon") else limits.DEFAULT_TYPICAL_EPSILON
            ),
            typical_delta=message.typical_delta if has("typical_delta") else limits.DEFAULT_TYPICAL_DELTA,
            constraint=_constraint(message.constraint) if has("constraint") else None,
        )
        if vocab_size is not None:
            _check_vocabulary(params, vocab_size)
    except InvalidRequestError as error:
        raise error.inside("sampling") from None
    return params


def log_prob_counts(options: sampling_pb2.LogProbOptions, vocab_size: int) -> tuple[int | None, int | None]:
    """Alternatives wanted beside each token of the completion and of the prompt; None wants no log-probabilities.

    Raises:
        InvalidRequestError: naming the field.
    """
    check_log_prob_counts(options.num_top, options.num_prompt_top, vocab_size)
    return (
        options.num_top if options.HasField("num_top") else None,
        options.num_prompt_top if options.HasField("num_prompt_top") else None,
    )


def check_speculation(options: sampling_pb2.SpeculationOptions) -> None:
    """Refuse a draft length or a drafter's name that is out of range.

    Raises:
        InvalidRequestError: naming the field.
    """
    if options.HasField("max_draft_tokens"):
        check_integer("speculation.max_draft_tokens", options.max_draft_tokens, 1, limits.MAX_DRAFT_LENGTH)
    check_length("speculation.drafter", options.drafter, 0, limits.MAX_DRAFTER_CHARACTERS)


def _check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name a token outside the vocabulary, or that may forbid every token of it."""
    for token, _ in params.logit_bias:
        check_token_id(f"logit_bias[{token}]", token, vocab_size)
    for index, run in enumerate(params.bad_runs):
        check_token_ids(f"bad_runs[{index}].token_ids", run, vocab_size)
    if len({run[-1] for run in params.bad_runs}) >= vocab_size:
        raise InvalidRequestError("bad_runs", "may leave no token to choose")


def _constraint(message: sampling_pb2.Constraint) -> Constraint:
    form = message.WhichOneof("form")
    if form is None:
        raise InvalidRequestError("constraint", "must have one form")
    kind = ConstraintKind(form)
    if kind is ConstraintKind.CHOICE:
        return Constraint(kind, choices=tuple(message.choice.texts))
    if kind is ConstraintKind.JSON_OBJECT:
        if not message.json_object:
            raise InvalidRequestError("constraint.json_object", "must be true where it is sent")
        return Constraint(kind)
    return Constraint(kind, text=getattr(message, form))
