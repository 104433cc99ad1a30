"""Block drafters both ways against the reference implementation, where the package `speculators` is importable.

See `test_speculators_package.py` on how to have it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoints import export_checkpoint, import_checkpoint
from paceline.methods.layouts.target_facts import TargetFacts
from tests.checkpoints.blocks import CASES, BlockCase, our_block, public_config, random_weights
from tests.checkpoints.conftest import WIDTH, random_taps, text
from tests.checkpoints.reference import write_public

pytest.importorskip("speculators", reason="the package speculators is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

COUNT = 12
FOLLOWING = [11, 23, 42, 8, 70]
OF_THE_TARGET = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}


def _classes(case: BlockCase) -> tuple[Any, Any]:
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dspark import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel

    if case.markov:
        return DSparkDraftModel, DSparkSpeculatorConfig
    return DFlashDraftModel, DFlashSpeculatorConfig


def _build(case: BlockCase, embedding: Tensor) -> Any:
    """The package's model with random weights, and the target's where it shares them."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    model_class, config_class = _classes(case)
    content = public_config(case)
    fields = {k: v for k, v in content["transformer_layer_config"].items() if k != "model_type"}
    layer = Qwen3Config(**fields)
    layer._attn_implementation = "eager"
    kept = (
        "draft_vocab_size",
        "aux_hidden_state_layer_ids",
        "mask_token_id",
        "block_size",
        "sample_from_anchor",
    )
    heads = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    config = config_class(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm=case.kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=case.shape.num_drafts)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **{name: content[name] for name in (*kept, *heads) if name in content},
    )
    model = model_class(config)
    missing, unexpected = model.load_state_dict(random_weights(case), strict=False)
    assert not unexpected
    assert set(missing) <= OF_THE_TARGET
    return _share(model, embedding)


def _share(model: Any, embedding: Tensor) -> Any:
    """Give a model what it shares with the target, as the package does where it knows which target that is."""
    with torch.no_grad():
        model.embed_tokens.weight.copy_(embedding)
        if not model.use_draft_vocab:
            model.lm_head.weight.copy_(embedding)
        model.verifier_lm_head.weight.fill_(1.0)
    return model.eval()


def _load(case: BlockCase, directory: Path, embedding: Tensor) -> Any:
    """The package's model from a directory."""
    model_class, config_class = _classes(case)
    config = config_class.from_pretrained(str(directory))
    config.transformer_layer_config._attn_implementation = "eager"
    model = model_class.from_pretrained(str(directory), config=config)
    written, loaded = load_file(directory / "model.safetensors"), model.state_dict()
    assert set(loaded) - set(written) <= OF_THE_TARGET
    assert all(torch.equal(loaded[name], tensor) for name, tensor in written.items())
    return _share(model, embedding)


def _package_block(
    model: Any, case: BlockCase, taps: Tensor, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor | None]:
    """As `our_block`, from the package's own forward pass over a text that goes on, with one block behind its end."""
    import speculators.models.dflash.core as core
    from speculators.losses import resolve_loss_config

    anchor = len(tokens) - 1
    monkeypatch.setattr(core, "select_anchors", lambda *_: (torch.tensor([anchor]), torch.tensor([True])))
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, _args, output: seen.update({name: output.detach()})

    hooks = [model.lm_head.register_forward_hook(keep("logits"))]
    if case.markov:
        hooks += [model.markov_head.markov_w2.register_forward_hook(keep("bias"))]
        if case.markov == "rnn":  # goes through `markov_w2` row by row
            parts: list[Tensor] = []
            hooks += [
                model.markov_head.markov_w2.register_forward_hook(
                    lambda _module, _args, output: parts.append(output.detach())
                )
            ]
        if case.confidence:
            hooks += [model.confidence_head.register_forward_hook(keep("odds"))]
    whole = [*tokens, *FOLLOWING, *range(10, 20)]
    length = len(whole)
    ahead = torch.randn(length - anchor, 3 * WIDTH)  # of the anchor on, which nothing may read
    extra = {} if not case.markov else {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]}
    with torch.no_grad():
        model(
            hidden_states=torch.cat([taps, ahead])[None],
            input_ids=torch.tensor([whole]),
            loss_mask=torch.ones(1, length),
            verifier_last_hidden_states=torch.randn(1, length, WIDTH),
            document_ids=torch.zeros(1, length, dtype=torch.long),
            loss_config=resolve_loss_config("kl_div", "eager"),
            max_anchors=1,
            **extra,
        )
    for hook in hooks:
        hook.remove()
    first = case.shape.block_size - case.shape.num_drafts
    logits = seen["logits"].view(case.shape.block_size, -1)
    if case.markov:
        bias = torch.cat(parts) if case.markov == "rnn" else seen["bias"].view(case.shape.block_size, -1)
        logits = logits + bias
    odds = seen.get("odds")
    confidence = None if odds is None else torch.nn.functional.logsigmoid(odds.flatten()[first:])
    return logits[first:], confidence


def _compare(ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None]) -> None:
    for found, expected in zip(ours, theirs, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
            assert expected.std() > 0.1


@pytest.mark.parametrize("name", CASES)
def test_what_the_package_saved_computes_the_same_here(
    name: str, target: TargetFacts, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, tokens, taps = CASES[name], text(COUNT), random_taps(COUNT - 1)
    model = _build(case, target.embedding(torch.float32))
    model.save_pretrained(str(tmp_path / "public"))
    assert load_file(tmp_path / "public" / "model.safetensors").keys() == random_weights(case).keys()
    import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    ours = our_block(tmp_path / "own", target_dir, case, taps, tokens, FOLLOWING)
    _compare(ours, _package_block(model, case, taps, tokens, monkeypatch))


@pytest.mark.parametrize("name", CASES)
def test_what_is_exported_computes_the_same_in_the_package(
    name: str, target: TargetFacts, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, tokens, taps = CASES[name], text(COUNT), random_taps(COUNT - 1)
    write_public(tmp_path / "public", public_config(case), random_weights(case))
    import_checkpoint(tmp_path / "public", target_dir, tmp_path / "own")
    export_checkpoint(tmp_path / "own", "speculators", tmp_path / "exported", target_dir)
    model = _load(case, tmp_path / "exported", target.embedding(torch.float32))
    ours = our_block(tmp_path / "own", target_dir, case, taps, tokens, FOLLOWING)
    _compare(ours, _package_block(model, case, taps, tokens, monkeypatch))
