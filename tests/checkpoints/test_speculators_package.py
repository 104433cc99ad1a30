"""Both ways against the reference implementation, where the package `speculators` is importable.

It cannot be installed beside Paceline by a resolver (it asks for an older transformers), so it is no dependency of the
tests: `pip install --no-deps speculators==0.9.0` and what its import asks for, in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoints import export_checkpoint, import_checkpoint
from tests.checkpoints.conftest import CASES, NUM_DEPTHS, WIDTH, Case, our_logits, random_taps, text
from tests.checkpoints.reference import public_config, random_weights, write_public

pytest.importorskip("speculators", reason="the package speculators is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

COUNT = 12


def _classes(kind: str) -> tuple[Any, Any]:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig

    if kind == "peagle":
        return PEagleDraftModel, PEagleSpeculatorConfig
    return Eagle3DraftModel, Eagle3SpeculatorConfig


def _build(case: Case) -> Any:
    """The package's model with random weights."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    model_class, config_class = _classes(case.kind)
    fields = {k: v for k, v in case.layer_config.items() if k != "model_type"}
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[case.layer_config["model_type"]](**fields)
    layer._attn_implementation = "eager"
    config = config_class(
        transformer_layer_config=layer,
        draft_vocab_size=case.draft_vocab,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        speculators_config=SpeculatorsConfig(
            algorithm=case.kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **case.flags,
    )
    model = model_class(config)
    missing, unexpected = model.load_state_dict(random_weights(case), strict=False)
    assert not unexpected
    assert set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight"}
    return model


def _load(kind: str, directory: Path) -> Any:
    """The package's model from a directory."""
    model_class, config_class = _classes(kind)
    config = config_class.from_pretrained(str(directory))
    config.transformer_layer_config._attn_implementation = "eager"
    model = model_class.from_pretrained(str(directory), config=config)
    written, loaded = load_file(directory / "model.safetensors"), model.state_dict()
    assert set(loaded) - set(written) <= {"verifier_lm_head.weight", "verifier_norm.weight"}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in written.items())
    return model


def _package_logits(
    model: Any, kind: str, taps: Tensor, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """As `our_logits`, from the package's own forward pass."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _args, output: seen.append(output[0].detach()))
    torch.nn.init.ones_(model.verifier_lm_head.weight)
    if kind == "eagle3":
        with torch.no_grad():
            model(
                hidden_states=taps[None],
                input_ids=torch.tensor([tokens]),
                document_ids=torch.zeros(1, COUNT, dtype=torch.long),
                ttt_steps=2,
            )
        hook.remove()
        return torch.cat([seen[0], seen[1][-1:]])  # the last row's next token is padding: 0
    # Rows of the last position whose whole chain lies within the package's text, which is longer by what it masks.
    import speculators.models.peagle.core as core
    from speculators.losses import resolve_loss_config

    masks = NUM_DEPTHS - 1
    anchors = torch.cat([torch.arange(COUNT + masks), torch.full((masks,), COUNT - 1)])
    depths = torch.cat([torch.zeros(COUNT + masks, dtype=torch.long), torch.arange(1, NUM_DEPTHS)])
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchors, depths))
    length = COUNT + masks
    with torch.no_grad():
        model(
            hidden_states=torch.cat([taps, torch.randn(masks, 3 * WIDTH)])[None],
            input_ids=torch.tensor([[*tokens, *range(10, 10 + masks)]]),
            document_ids=torch.zeros(1, length, dtype=torch.long),
            loss_mask=torch.ones(1, length),
            verifier_last_hidden_states=torch.randn(1, length, WIDTH),
            num_depths=NUM_DEPTHS,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
    hook.remove()
    return torch.cat([seen[0][:COUNT], seen[0][length:]])


@pytest.mark.parametrize("name", CASES)
def test_what_the_package_saved_computes_the_same_here(
    name: str, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, tokens, taps = CASES[name], text(COUNT), random_taps(COUNT)
    model = _build(case)
    model.save_pretrained(str(tmp_path / "public"))
    theirs = _package_logits(model, case.kind, taps, tokens, monkeypatch)
    import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    ours = our_logits(tmp_path / "own", target_dir, taps, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert theirs.std() > 0.1


@pytest.mark.parametrize("name", CASES)
def test_what_is_exported_computes_the_same_in_the_package(
    name: str, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, tokens, taps = CASES[name], text(COUNT), random_taps(COUNT)
    write_public(tmp_path / "public", public_config(case), random_weights(case))
    import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    export_checkpoint(tmp_path / "own", "speculators", tmp_path / "exported", target_dir, str(target_dir))
    theirs = _package_logits(_load(case.kind, tmp_path / "exported"), case.kind, taps, tokens, monkeypatch)
    ours = our_logits(tmp_path / "own", target_dir, taps, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
