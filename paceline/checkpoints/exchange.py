"""Import and export of a checkpoint directory, in any public format. Called by `paceline checkpoints`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from paceline.checkpoints.formats import find_format, format_named
from paceline.methods.checkpoint import ANY_TARGET, CheckpointError, DrafterConfig
from paceline.methods.layouts.layout import Checkpoint
from paceline.methods.layouts.public_checkpoint import PublicCheckpoint
from paceline.methods.layouts.target_facts import TargetFacts
from paceline.methods.layouts.tensor_files import check_finite
from paceline.methods.registry import METHODS


def import_checkpoint(
    directory: Path,
    target_dir: Path,
    output: Path,
    format_name: str | None = None,
    tap_layers: Sequence[int] | None = None,
    ignored: Collection[str] = (),
) -> DrafterConfig:
    """Turn a public checkpoint into one that Paceline serves.

    Args:
        directory: the public checkpoint.
        target_dir: the target it was made for; sizes are compared, and what is shared is read from it.
        output: directory to write.
        format_name: its format; None recognises it by `config.json`.
        tap_layers: layers whose *entering* streams are read, if the checkpoint's own ids mean something else.
        ignored: keys of its `config.json` that no reader knows and that the caller declares to be without effect; a key
            of an object in full, such as `dflash_config.name`.

    Raises:
        CheckpointError: naming the field or the tensor that cannot be used, and why.
    """
    entry = find_format(directory) if format_name is None else format_named(format_name)
    target = TargetFacts.read(target_dir)
    config, tensors = read_public(directory, target, entry.name, ignored)
    if tap_layers is not None:
        given, known = list(tap_layers), config.shape.get("tap_layers")
        if not isinstance(known, list) or len(given) != len(known):
            raise CheckpointError(f"the checkpoint reads {known} of the target, which {given} cannot replace")
        if not all(0 <= layer <= target.num_layers for layer in given):
            raise CheckpointError(f"tap layers {given} are not all within 0..{target.num_layers}")
        config = replace(config, shape={**config.shape, "tap_layers": given})
    entry.save(output, config, tensors)
    entry.carry(directory, output)
    return config


def read_public(
    directory: Path, target: TargetFacts, format_name: str | None = None, ignored: Collection[str] = ()
) -> Checkpoint:
    """Read a public checkpoint: every key of its configuration honoured or refused, every value of its tensors checked.

    Args:
        directory: the public checkpoint.
        target: what it was made for.
        format_name: its format; None recognises it by `config.json`.
        ignored: as of :func:`import_checkpoint`.

    Raises:
        CheckpointError: as of :func:`import_checkpoint`.
    """
    entry = find_format(directory) if format_name is None else format_named(format_name)
    checkpoint = PublicCheckpoint.open(directory, ignored)
    config, tensors = entry.read(checkpoint, target)
    checkpoint.config.finish()
    check_finite(tensors)
    return config, tensors


def export_checkpoint(
    directory: Path,
    format_name: str,
    output: Path,
    target_dir: Path | None = None,
    verifier: str | None = None,
) -> DrafterConfig:
    """Write one of Paceline's checkpoints in a public format.

    Args:
        directory: Paceline's checkpoint.
        format_name: one of `public_formats`.
        output: directory to write.
        target_dir: the target; if given, what the drafter shares with it is written too.
        verifier: name of the target in the file, by which other programs find it: a hub's id, or a path.

    Raises:
        CheckpointError: naming what the format cannot express.
    """
    entry = format_named(format_name)
    config = DrafterConfig.read(directory)
    method = METHODS.get(config.method)
    if method is None or format_name not in method.formats:
        raise CheckpointError(
            f"method {config.method!r} has no place in format {format_name!r}"
            + ("" if method is None else f"; it can be written as {', '.join(method.formats)}")
        )
    tensors: Mapping[str, Tensor]
    config, tensors = entry.load(directory, config)
    if target_dir is not None:
        target = TargetFacts.read(target_dir)
        if config.target_fingerprint not in (target.fingerprint, ANY_TARGET):
            raise CheckpointError(f"{directory.name!r} was not made for target {target.name!r}")
        config, tensors = entry.complete(config, tensors, target_dir)
    config = replace(config, target_name=verifier or "")
    entry.write(output, config, tensors)
    entry.carry(directory, output)
    return config
