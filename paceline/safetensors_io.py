"""A file of weights on disk, whole or not there at all, and readable to others than its writer.

Responsible for the one way that safetensors of models and drafters are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from paceline.atomic_write import replacing


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, in place of what is there; the directory is made.

    Tensors may lie anywhere, and share memory.
    """
    own: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        own[name] = plain.clone() if place in places else plain  # what shares memory cannot be saved
        places.add(place)
    with replacing(path) as part:
        save_file(own, part, metadata={"format": "pt"})
        part.chmod(0o644)  # it was written as a private temporary file; images run as another user
