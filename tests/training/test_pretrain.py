"""A model and its modules from nothing: it learns, resumes exactly, and the pair that it writes serves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from paceline.contract.errors import TrainingDataError
from paceline.methods.deepseek_mtp.objective import MtpShape
from paceline.methods.deepseek_mtp.pretrain import PretrainOptions, run
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.sampling.params import SamplingParams
from paceline.target import SequenceRows, TargetEngine
from paceline.training.data import Corpus
from paceline.training.shards import shard_indices
from tests.methods.mtp_reference import ReferenceMtp
from tests.training.test_trainer import _newest


@pytest.fixture
def options(target_dir: Path, text_dir: Path, heldout_dir: Path, tmp_path: Path) -> PretrainOptions:
    return PretrainOptions(
        target_dir,
        text_dir,
        heldout_dir,
        tmp_path / "run",
        tmp_path / "pair",
        hidden=32,
        num_layers=2,
        num_heads=4,
        head_dim=8,
        intermediate=48,
        num_modules=2,
        num_steps=8,
        batch_tokens=256,
        warmup_steps=2,
        eval_every=8,
        checkpoint_every=4,
        num_threads=1,
    )


@dataclass
class Pair:
    """What was written: the model as transformers runs it, and its modules as the reference does."""

    model: LlamaForCausalLM
    modules: ReferenceMtp

    @classmethod
    def read(cls, folder: Path, num_modules: int) -> Pair:
        model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        config, matrix = model.config, model.get_input_embeddings().weight.detach()
        shape = MtpShape(
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            target_vocab=config.vocab_size,
            target_layers=config.num_hidden_layers,
            rope_theta=config.rope_parameters["rope_theta"],
            rms_eps=config.rms_norm_eps,
            num_modules=num_modules,
            carries_norm=False,
        )
        tensors = load_file(folder / "drafter" / "model.safetensors")
        return cls(model, ReferenceMtp(shape, tensors, matrix, matrix))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> list[Tensor]:
        """On a text, of the model (row i for token i + 1) and module j (row i for token i + 2 + j): `[rows, vocab]`."""
        (features,) = self.model.model(tokens[None]).last_hidden_state
        found, state = [features @ self.modules.head.T], features
        for j in range(len(self.modules.modules)):
            rows = len(tokens) - 1 - j
            state, normed = self.modules.run(j, self.modules.embedding[tokens[1 + j :]], state[:rows])
            found.append(normed @ self.modules.head.T)
        return found


def test_it_learns_and_what_it_reports_is_what_the_written_pair_does(options: PretrainOptions) -> None:
    first = run(replace(options, num_steps=1, run_dir=options.run_dir / "other", eval_every=1))
    last = run(replace(options, num_steps=30, eval_every=30))
    assert last.own < first.own - 0.3
    assert last.modules < first.modules - 0.3
    pair = Pair.read(options.export_dir, options.num_modules)
    losses, agreed = [], [[], []]
    corpus = Corpus(options.heldout_dir, options.batch_tokens, options.seed, with_features=False)
    for batch in corpus.epoch(0, shard_indices(options.heldout_dir)):
        rows: list[list[Tensor]] = [[], [], []]
        for row, length in enumerate(batch.lengths.tolist()):
            tokens = batch.tokens[row, :length]
            own, *modules = pair.logits(tokens)
            for depth, logits in enumerate((own, *modules)):
                labels = tokens[1 + depth :]
                rows[depth].append(F.cross_entropy(logits[: len(labels)], labels, reduction="none"))
            for depth, logits in enumerate(
                modules
            ):  # row i proposes what the model chooses one row on or more
                chosen = own[1 + depth : -1].argmax(-1)
                agreed[depth].append(logits[: len(chosen)].argmax(-1) == chosen)
        losses.append([torch.cat(of_depth).mean() for of_depth in rows])
    own, *by_module = torch.tensor(losses).mean(0).tolist()
    assert last.own == pytest.approx(own, abs=1e-4)
    assert last.modules == pytest.approx(sum(by_module) / len(by_module), abs=1e-4)
    shares = [float(torch.cat(of_depth).float().mean()) for of_depth in agreed]
    assert list(last.accepted) == pytest.approx(shares, abs=1e-3)
    assert min(shares) > 0.05  # of 259 tokens


def test_the_pair_serves(options: PretrainOptions) -> None:
    run(options)
    pair = Pair.read(options.export_dir, options.num_modules)
    model = options.export_dir / "model"
    drafter = load_drafter(options.export_dir / "drafter", model, dtype=torch.float32)
    assert drafter.tap is not None
    engine = TargetEngine.load(model, dtype=torch.float32, taps=[drafter.tap])
    tokens = list(range(40, 52))
    output = engine.step([SequenceRows(engine.open(), tokens, num_logits="last")])
    whole = [*tokens, int(output.logits[0][-1].argmax())]
    drafter.open(1, whole)
    drafter.feed(1, 0, output.features[0])
    (entry,) = drafter.draft([DraftRequest(1, 3, sampling=SamplingParams(temperature=0.0))])
    assert entry is not None
    expected: list[int] = []
    while len(expected) < 3:
        expected.append(int(pair.modules.logits(output.features[0], whole, expected)[-1].argmax()))
    assert list(entry.tokens) == expected
    # Without its module it is a model like any other: to transformers, and to a target that nobody drafts for.
    alone = TargetEngine.load(model, dtype=torch.float32)
    without = alone.step([SequenceRows(alone.open(), tokens, num_logits="last")]).logits[0][-1]
    torch.testing.assert_close(without, output.logits[0][-1])
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        expected_logits = reference(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(without, expected_logits, atol=1e-3, rtol=1e-3)
    for path in (model, options.export_dir / "drafter"):  # images run as another user
        assert (path / "model.safetensors").stat().st_mode & 0o777 == 0o644
        assert not list(path.glob("*.part"))


def test_stopped_and_resumed_equals_uninterrupted(options: PretrainOptions, tmp_path: Path) -> None:
    run(options)
    parts = replace(options, run_dir=tmp_path / "parts")
    assert run(parts, stop_after=5).step == 5
    torch.rand(7)  # whatever else drew in between
    assert run(parts).step == 8
    first, second = _newest(options.run_dir), _newest(parts.run_dir)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)
    before = load_file(options.run_dir / "step-000004" / "weights.safetensors")
    assert not any(torch.equal(first[k], before[k]) for k in first)
    with pytest.raises(TrainingDataError, match="another kind of run"):
        run(replace(parts, hidden=64))


@pytest.mark.parametrize(
    ("field", "value"), [("num_modules", 0), ("num_kv_heads", 3), ("head_dim", 7), ("floor", 0.0)]
)
def test_bad_options_are_named(options: PretrainOptions, field: str, value: float) -> None:
    with pytest.raises(TrainingDataError, match=field):
        run(replace(options, **{field: value}))
