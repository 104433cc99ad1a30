"""Sampling parameters from the wire, with the defaults that paceline.v1.SamplingParams documents.

Called by: verifier and drafter, which must choose alike.
"""

from __future__ import annotations

from paceline.errors import InvalidRequestError
from paceline.sampling import ParameterError, SamplingParams, VerifyMode
from paceline.v1 import sampling_pb2

_MODES = {
    sampling_pb2.VERIFY_MODE_UNSPECIFIED: None,
    sampling_pb2.VERIFY_MODE_GREEDY: VerifyMode.GREEDY,
    sampling_pb2.VERIFY_MODE_COUPLED: VerifyMode.COUPLED,
    sampling_pb2.VERIFY_MODE_REJECTION: VerifyMode.REJECTION,
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
        )
    except ParameterError as error:
        raise InvalidRequestError(f"sampling.{error.field}", error.message) from None
