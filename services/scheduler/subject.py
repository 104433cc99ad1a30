"""The subject of a set of measurements: a target on a device, and how it is drafted for.

Responsible for: checking a MeasurementKey from the wire, and the names of a subject's Redis keys. Deliberately
does not know: measurements, Redis itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from urllib.parse import quote, unquote

from paceline.contract.errors import InvalidRequestError
from paceline.contract.limits import MAX_LABEL_CHARACTERS
from paceline.v1 import scheduler_pb2

PLACEMENTS = ("colocated", "separate", "none")
_KEY_PREFIX = "paceline:v1"


@dataclass(frozen=True, slots=True)
class Subject:
    """A target on a device, and how it is drafted for. ``method`` is empty for plain decoding."""

    model_fingerprint: str
    dtype: str
    device_name: str
    method: str
    placement: str

    @classmethod
    def from_proto(cls, key: scheduler_pb2.MeasurementKey) -> Subject:
        """Check a key.

        Raises:
            InvalidRequestError: a field is missing, too long, not printable, or names no placement.
        """
        subject = cls(key.model_fingerprint, key.dtype, key.device_name, key.method, key.placement or "none")
        for field, value in asdict(subject).items():
            if not value and field != "method":
                raise InvalidRequestError(f"key.{field}", "is missing")
            if len(value) > MAX_LABEL_CHARACTERS or not value.isprintable():
                raise InvalidRequestError(
                    f"key.{field}", f"is longer than {MAX_LABEL_CHARACTERS} or not printable"
                )
        if subject.placement not in PLACEMENTS:
            raise InvalidRequestError("key.placement", f"must be one of {', '.join(PLACEMENTS)}")
        return subject

    @property
    def is_speculative(self) -> bool:
        """Whether there is a drafter."""
        return bool(self.method) and self.placement != "none"

    @property
    def model_label(self) -> str:
        """Short name for metrics and logs."""
        return self.model_fingerprint[:12]

    def to_proto(self) -> scheduler_pb2.MeasurementKey:
        """Wire form."""
        return scheduler_pb2.MeasurementKey(**asdict(self))

    @classmethod
    def from_redis_key(cls, key: str) -> tuple[Subject, str] | None:
        """The subject and part of a key made by `redis_key`; None for any other key."""
        prefix, _, rest = key.partition(f"{_KEY_PREFIX}:")
        values = rest.split(":")
        if prefix or len(values) != 6:
            return None
        model, dtype, device, method, placement = (unquote(value) for value in values[:5])
        return cls(model, dtype, device, "" if method == "none" else method, placement), values[5]

    def redis_key(self, part: str) -> str:
        """``paceline:v1:{model}:{dtype}:{device}:{method}:{placement}:{part}``; values are percent-encoded."""
        values = (
            self.model_fingerprint,
            self.dtype,
            self.device_name,
            self.method or "none",
            self.placement,
        )
        return ":".join((_KEY_PREFIX, *(quote(value, safe="") for value in values), part))
