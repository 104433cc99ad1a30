"""The target engine: a ragged forward step over many sequences, with taps, on CPU or CUDA."""

from paceline.model.device import Device, UnknownDeviceError, configure_threads
from paceline.model.weights import UnsupportedModelError
from paceline.target.engine import TargetEngine
from paceline.target.kv.cache import KVCacheFullError
from paceline.target.kv.prefix_cache import KeptPrefix, PrefixCache, common_prefix
from paceline.target.kv.slot import SlotError
from paceline.target.step import SequenceRows, StepError, StepOutput
from paceline.target.taps import CachedLayer, TapPart, TapSpec

__all__ = [
    "CachedLayer",
    "Device",
    "KVCacheFullError",
    "KeptPrefix",
    "PrefixCache",
    "SequenceRows",
    "SlotError",
    "StepError",
    "StepOutput",
    "TapPart",
    "TapSpec",
    "TargetEngine",
    "UnknownDeviceError",
    "UnsupportedModelError",
    "common_prefix",
    "configure_threads",
]
