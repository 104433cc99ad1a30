"""Sampling parameters from the wire, with the defaults that paceline.v1.SamplingParams documents.

Called by: gateway, conductor and verifier, which refuse alike, and the drafter, which must choose as the verifier does.
"""

from __future__ import annotations

from paceline.contract.errors import InvalidRequestError
from paceline.sampling import Constraint, ConstraintKind, ParameterError, SamplingParams, VerifyMode
from paceline.sampling.params import MAX_TOP_LOG_PROBS
from paceline.v1 import sampling_pb2

_MODES = {
    sampling_pb2.VERIFY_MODE_UNSPECIFIED: None,
    sampling_pb2.VERIFY_MODE_GREEDY: VerifyMode.GREEDY,
    sampling_pb2.VERIFY_MODE_COUPLED: VerifyMode.COUPLED,
    sampling_pb2.VERIFY_MODE_REJECTION: VerifyMode.REJECTION,
    sampling_pb2.VERIFY_MODE_BLOCK: VerifyMode.BLOCK,
    sampling_pb2.VERIFY_MODE_TYPICAL: VerifyMode.TYPICAL,
}


def sampling_params(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Checked parameters.

    Raises:
        InvalidRequestError: naming the field that is out of range.
    """
    if message.mode not in _MODES:
        raise InvalidRequestError("sampling.mode", f"{message.mode} is not a verification mode")
    try:
        return SamplingParams(
            temperature=message.temperature if message.HasField("temperature") else 0.0,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            min_p=message.min_p,
            seed=message.seed,
            mode=_MODES[message.mode],
            repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple(sorted(message.logit_bias.items())),
            bad_runs=tuple(tuple(run.token_ids) for run in message.bad_runs),
            min_tokens=message.min_tokens,
            typical_epsilon=message.typical_epsilon if message.HasField("typical_epsilon") else 0.09,
            typical_delta=message.typical_delta if message.HasField("typical_delta") else 0.3,
            constraint=_constraint(message.constraint) if message.HasField("constraint") else None,
        )
    except ParameterError as error:
        raise InvalidRequestError(f"sampling.{error.field}", error.message) from None


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name a token outside the vocabulary, or may forbid all that it has.

    Raises:
        InvalidRequestError: naming the entry, such as ``sampling.logit_bias[50000]``.
    """
    for token, _ in params.logit_bias:
        _in_vocabulary(f"sampling.logit_bias[{token}]", token, vocab_size)
    for index, run in enumerate(params.bad_runs):
        for place, token in enumerate(run):
            _in_vocabulary(f"sampling.bad_runs[{index}].token_ids[{place}]", token, vocab_size)
    if len({run[-1] for run in params.bad_runs}) >= vocab_size:
        raise InvalidRequestError("sampling.bad_runs", "may leave no token to choose")


def check_log_probs(options: sampling_pb2.LogProbOptions, vocab_size: int) -> tuple[int | None, int | None]:
    """Alternatives asked for beside each token of the completion and of the prompt; None asks for nothing.

    Raises:
        InvalidRequestError: naming the field.
    """
    limit = min(MAX_TOP_LOG_PROBS, vocab_size)
    for field in ("num_top", "num_prompt_top"):
        if getattr(options, field) > limit:
            raise InvalidRequestError(
                f"log_probs.{field}", f"must be from 0 to {limit}, got {getattr(options, field)}"
            )
    return (
        options.num_top if options.HasField("num_top") else None,
        options.num_prompt_top if options.HasField("num_prompt_top") else None,
    )


def _in_vocabulary(field: str, token: int, vocab_size: int) -> None:
    if token >= vocab_size:
        raise InvalidRequestError(field, f"{token} is outside the vocabulary of {vocab_size} tokens")


def _constraint(message: sampling_pb2.Constraint) -> Constraint:
    form = message.WhichOneof("form")
    if form is None:
        raise ParameterError("constraint", "must have one form")
    kind = ConstraintKind(form)
    if kind is ConstraintKind.CHOICE:
        return Constraint(kind, choices=tuple(message.choice.texts))
    if kind is ConstraintKind.JSON_OBJECT:
        if not message.json_object:
            raise ParameterError("constraint.json_object", "must be true where it is sent")
        return Constraint(kind)
    return Constraint(kind, text=getattr(message, form))
