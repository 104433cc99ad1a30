"""The drafter that comes with the package: whole, small, described, and for the target it names."""

from __future__ import annotations

import pytest
import torch

from paceline.methods.checkpoint import DrafterConfig, load_tensors
from paceline.methods.eagle3.drafter import parameter_shapes
from paceline.methods.loading import default_drafter, drafter_tap, load_drafter
from paceline.models import DEFAULT_MODEL, cached, model_fingerprint

MAX_BYTES = 19_500_000


def test_checkpoint_is_whole_and_small() -> None:
    path = default_drafter(DEFAULT_MODEL)
    config = DrafterConfig.read(path)
    assert config.method == "eagle3"
    tensors = load_tensors(path, parameter_shapes(config))
    ids = tensors["d2t"] + torch.arange(config.size("draft_vocab"))
    assert torch.equal(tensors["t2d"].nonzero().squeeze(1), ids)
    assert all(bool(torch.isfinite(t.float()).all()) for t in tensors.values())
    assert (path / "model.safetensors").stat().st_size <= MAX_BYTES
    tap = drafter_tap(path)
    assert tap is not None
    assert tap.layers == (2, 15, 27)


def test_figures_in_the_readme_are_those_of_the_weights() -> None:
    path = default_drafter(DEFAULT_MODEL)
    training = DrafterConfig.read(path).training
    readme = (path / "README.md").read_text()
    assert training["data"]["command"] in readme
    assert f"{training['heldout_mean_accepted_of_5']:.2f}" in readme
    assert training["heldout_mean_accepted_of_5"] > 0.8


def test_it_loads_for_the_target_it_was_made_for() -> None:
    target = cached(DEFAULT_MODEL)
    if target is None:
        pytest.skip("the default model is not cached: `paceline models fetch smollm2-135m`")
    path = default_drafter(DEFAULT_MODEL)
    assert DrafterConfig.read(path).target_fingerprint == model_fingerprint(target)
    assert load_drafter(path, target).tap is not None
