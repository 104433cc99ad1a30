"""The independent drafter with another tokenizer, with a part of the vocabulary, and as a bare transformers model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from experiments.decoding.arm import Arm
from experiments.decoding.generation import generate
from experiments.decoding.tally import Tally
from experiments.modes.arm import ARMS, GREEDY_ARMS
from paceline.drafts import DraftEntry, DrawRule
from paceline.methods.checkpoint import ANY_TARGET, CheckpointError, DrafterConfig
from paceline.methods.drafter import Drafter, DraftRequest, OutcomeRequest
from paceline.methods.independent.drafter import IndependentDrafter
from paceline.methods.loading import drafter_tap, load_drafter
from paceline.models import DEFAULT_MODEL, cached, model_fingerprint, resolve
from paceline.sampling.distribution import DraftDistribution
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.target import TargetEngine
from paceline.trie import DraftTrie
from tests.methods.foreign import (
    TEXT,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    save_model,
    tiny_tokenizer,
)
from tests.sampling.enumeration import ROOT, Shape, drawn_entries, largest_gap, tree_outcomes
from tests.sampling.rejection import decide_tree
from tests.sampling.toy import Prefix, ToyModel

TARGET, OWN = byte_level_tokenizer(), byte_fallback_tokenizer()
NUM_TARGET, NUM_OWN = TARGET.get_vocab_size(), OWN.get_vocab_size()
COUPLED = SamplingParams(temperature=0.8, seed=3)
GREEDY = SamplingParams(temperature=0.0)

Directories = tuple[Path, Path]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target over byte-level tokens; its head is padded by twelve rows."""
    return save_model(tmp_path_factory.mktemp("target"), TARGET, NUM_TARGET + 12, seed=0, num_layers=2)


@pytest.fixture(scope="module")
def foreign_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the other tokenizer family, as transformers saves it."""
    return save_model(tmp_path_factory.mktemp("foreign"), OWN, NUM_OWN, seed=1)


def write_config(path: Path, target_dir: Path, **shape: object) -> Path:
    """A checkpoint's `config.json`."""
    content = {
        "method": "independent",
        "target_fingerprint": model_fingerprint(target_dir),
        "shape": shape,
        "format_version": 1,
    }
    (path / "config.json").write_text(json.dumps(content))
    return path


def load(path: Path, target_dir: Path) -> IndependentDrafter:
    drafter = load_drafter(path, target_dir, dtype=torch.float32)
    assert isinstance(drafter, IndependentDrafter)
    return drafter


def draft(
    drafter: Drafter, sequence_id: int, num_tokens: int, sampling: SamplingParams = GREEDY
) -> DraftEntry:
    (entry,) = drafter.draft([DraftRequest(sequence_id, num_tokens, sampling=sampling)])
    assert entry is not None
    return entry


def fresh(
    drafter: Drafter, tokens: Sequence[int], num_tokens: int, sampling: SamplingParams = GREEDY
) -> DraftEntry:
    """A draft after a text, of a sequence of its own."""
    drafter.open(99, tokens)
    entry = draft(drafter, 99, num_tokens, sampling)
    drafter.close(99)
    return entry


def same(one: DraftEntry, other: DraftEntry) -> bool:
    """Whether two drafts propose the same, with the same log-probabilities as far as rounding goes."""
    assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    return (one.start, one.tokens, one.parents) == (other.start, other.tokens, other.parents)


def reference(
    model_dir: Path, own_ids: list[int], pairs: dict[int, int], steps: int
) -> list[tuple[int, float]]:
    """Greedy tokens as target ids, and their log-probabilities, by transformers and a mask."""
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    mask = torch.full((model.config.vocab_size,), -torch.inf)
    mask[list(pairs)] = 0
    ids, found = list(own_ids), []
    with torch.inference_mode():
        for _ in range(steps):
            log_probs = (model(torch.tensor([ids])).logits[0, -1] + mask).log_softmax(-1)
            ids.append(int(log_probs.argmax()))
            found.append((pairs[ids[-1]], float(log_probs[ids[-1]])))
    return found


def pairs_of(drafter: IndependentDrafter) -> dict[int, int]:
    """Target id of each of the drafter's ids."""
    own_of = drafter._own_of
    assert own_of is not None
    return {own: target for target, own in own_of.items()}


PROMPT = TARGET.encode("<|user|>" + TEXT[:90] + "<|end|>").ids


class TestAnotherTokenizer:
    def test_the_chain_is_the_models_own_over_what_both_share(
        self, target_dir: Path, foreign_dir: Path
    ) -> None:
        drafter = load(foreign_dir, target_dir)
        own_ids = [OWN.token_to_id("<s>"), *OWN.encode(TEXT[:90], add_special_tokens=False).ids]
        own_ids.append(OWN.token_to_id("<|end|>"))
        wanted = reference(foreign_dir, own_ids, pairs_of(drafter), 6)
        entry = fresh(drafter, PROMPT, 6)
        assert list(entry.tokens) == [token for token, _ in wanted]
        assert entry.log_probs == pytest.approx([log_prob for _, log_prob in wanted], abs=1e-4)

    def test_drafts_are_the_same_however_the_text_came(self, target_dir: Path, foreign_dir: Path) -> None:
        drafter = load(foreign_dir, target_dir)
        text = TARGET.encode(TEXT).ids
        for sampling in (GREEDY, COUPLED):
            drafter.open(1, text[:40])
            for place in range(40, 60):
                drafted = draft(drafter, 1, 4, sampling)
                assert same(drafted, fresh(drafter, text[:place], 4, sampling))
                drafter.extend(1, place, text[place : place + 1])
            drafter.extend(1, 50, text[50:64])  # told again, and more
            assert same(draft(drafter, 1, 4, sampling), fresh(drafter, text[:64], 4, sampling))

    @pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
    @pytest.mark.parametrize("num_accepted", [0, 1, 3, 4])
    def test_after_a_verification_it_drafts_like_a_new_one(
        self, target_dir: Path, foreign_dir: Path, num_accepted: int, sampling: SamplingParams
    ) -> None:
        drafter = load(foreign_dir, target_dir)
        for correction in ("de", " of", "<|user|>", "<|end|>", "\n", "漢"):
            drafter.open(1, PROMPT)
            drafted = draft(drafter, 1, 4, sampling).tokens
            committed = [*drafted[:num_accepted], *TARGET.encode(correction).ids]
            drafter.extend(1, len(PROMPT), committed)
            text = [*PROMPT, *committed]
            assert same(draft(drafter, 1, 5, sampling), fresh(drafter, text, 5, sampling))

    def test_a_correction_takes_back_what_it_changes_of_the_text_before_it(
        self, target_dir: Path, foreign_dir: Path
    ) -> None:
        drafter = load(foreign_dir, target_dir)
        text = TARGET.encode("The wind of the ri").ids
        drafter.open(1, text)
        draft(drafter, 1, 3)
        state = drafter._sequences[1]
        before = list(state.own.ids)
        drafter.extend(1, len(text), TARGET.encode("de").ids)
        assert OWN.id_to_token(state.own.ids[-1]) == "▁ride"
        assert state.num_cached == len(state.own.ids) - 1 < len(before)
        assert same(draft(drafter, 1, 3), fresh(drafter, [*text, *TARGET.encode("de").ids], 3))

    def test_a_chain_that_foretold_the_commit_goes_on(self, target_dir: Path, foreign_dir: Path) -> None:
        drafter = load(foreign_dir, target_dir)
        steps = []
        engine_step = drafter._model.step
        drafter._model.step = lambda rows: steps.append(len(rows[0].tokens)) or engine_step(rows)  # type: ignore[method-assign, func-returns-value]
        for seed in range(40):  # until a chain's tokens are read as they were drafted
            sampling = SamplingParams(temperature=1.0, seed=seed)
            drafter.open(1, PROMPT)
            ahead = draft(drafter, 1, 6, sampling)
            drafter.extend(1, len(PROMPT), ahead.tokens[:2])
            if drafter._sequences[1].chain:
                steps.clear()
                assert draft(drafter, 1, 4, sampling).tokens == ahead.tokens[2:]
                assert steps == []
                return
        pytest.fail("no chain was read as it was drafted")

    def test_within_a_character_there_is_no_draft(self, target_dir: Path, foreign_dir: Path) -> None:
        drafter = load(foreign_dir, target_dir)
        first, second = TARGET.token_to_id("Ã"), TARGET.token_to_id("¥")
        drafter.open(1, [*PROMPT, first])
        drafter.open(2, PROMPT)
        entries = drafter.draft([DraftRequest(1, 3), DraftRequest(2, 3)])
        assert entries[0] is None
        assert entries[1] is not None
        drafter.extend(1, len(PROMPT) + 1, [second])
        assert same(draft(drafter, 1, 3), fresh(drafter, [*PROMPT, first, second], 3))

    def test_drafted_in_groups_as_alone(self, target_dir: Path, foreign_dir: Path) -> None:
        drafter = load(foreign_dir, target_dir)
        texts = {1: PROMPT, 2: TARGET.encode("A short one").ids, 3: TARGET.encode(TEXT).ids}
        for key, tokens in texts.items():
            drafter.open(key, tokens)
        requests = [DraftRequest(key, 2 + key, sampling=COUPLED) for key in texts]
        together = drafter.draft(requests)
        for (key, tokens), entry in zip(texts.items(), together, strict=True):
            alone = fresh(drafter, tokens, 2 + key, COUPLED)
            assert entry is not None
            assert same(entry, alone)

    def test_past_its_positions_it_says_nothing(self, target_dir: Path, foreign_dir: Path) -> None:
        drafter = load(foreign_dir, target_dir)
        tokens = TARGET.encode(TEXT * 6).ids
        own_length = len(OWN.encode(TEXT * 6).ids)
        assert own_length > drafter.max_positions
        drafter.open(1, tokens)
        assert drafter.draft([DraftRequest(1, 2)]) == [None]

    def test_what_may_follow_outcomes_is_its_own_draft_there(
        self, target_dir: Path, foreign_dir: Path
    ) -> None:
        drafter = load(foreign_dir, target_dir)
        drafter.open(1, PROMPT)
        drafted = draft(drafter, 1, 3)
        (entry,) = drafter.draft_outcomes([OutcomeRequest(1, 2, 4, 40)])
        assert entry is not None
        pairs = pairs_of(drafter)
        own_of = {target: own for own, target in pairs.items()}
        own_prompt = list(drafter._sequences[1].own.ids)
        model = LlamaForCausalLM.from_pretrained(foreign_dir, dtype=torch.float32)
        mask = torch.full((NUM_OWN,), -torch.inf)
        mask[list(pairs)] = 0
        paths: list[tuple[int, ...]] = []
        followers: set[tuple[int, ...]] = set()
        for token, parent, log_prob in zip(entry.tokens, entry.parents, entry.log_probs, strict=True):
            path = (*(paths[parent] if parent >= 0 else ()), token)
            paths.append(path)
            own_path = [*own_prompt, *(own_of[one] for one in path)]
            with torch.inference_mode():
                log_probs = (model(torch.tensor([own_path])).logits[0, -2] + mask).log_softmax(-1)
            assert log_prob == pytest.approx(float(log_probs[own_path[-1]]), abs=1e-4)
            outcome = next(
                (i for i in range(len(path)) if path[: i + 1] != drafted.tokens[: i + 1]), len(path)
            )
            if len(path) > outcome + 1:
                followers.add(path[: outcome + 1])
        assert len(followers) == 4  # outcomes with something behind them
        assert draft(drafter, 1, 3).tokens == drafted.tokens

    def test_a_cut_head_drafts_the_same(self, target_dir: Path, foreign_dir: Path, tmp_path: Path) -> None:
        drafts = []
        for name, prune in (("cut", True), ("whole", False)):
            path = tmp_path / name
            path.mkdir()
            (path / "model").symlink_to(foreign_dir)
            write_config(path, target_dir, target_vocab=NUM_TARGET + 12, prune_head=prune)
            drafter = load(path, target_dir)
            assert (drafter._model._head is not None) == prune
            drafts.append([fresh(drafter, PROMPT, 5, sampling) for sampling in (GREEDY, COUPLED)])
        for cut, whole in zip(*drafts, strict=True):
            assert same(cut, whole)

    def test_the_way_between_two_tokenizers_is_kept(self, target_dir: Path, foreign_dir: Path) -> None:
        one, other = load(foreign_dir, target_dir), load(foreign_dir, target_dir)
        for drafter in (one, other):
            drafter.open(1, PROMPT)
        assert one._sequences[1].own._translation is other._sequences[1].own._translation  # type: ignore[attr-defined]

    @pytest.mark.parametrize("arm", [*GREEDY_ARMS, *ARMS], ids=lambda arm: arm.name)
    def test_every_mode_generates(self, target_dir: Path, foreign_dir: Path, arm: Arm) -> None:
        texts = [generated(target_dir, path, arm) for path in (foreign_dir, None)]
        assert len(texts[0]) == 24
        if arm.mode in (VerifyMode.GREEDY, VerifyMode.COUPLED):
            assert texts[0] == texts[1]


def generated(target_dir: Path, drafter_dir: Path | None, arm: Arm) -> list[int]:
    """24 tokens in this mode; without a drafter checkpoint one that the verifier never takes a token of."""
    engine = TargetEngine.load(target_dir, "cpu", torch.float32)
    drafter: Drafter = load(drafter_dir or target_dir, target_dir)
    temperature = 0.0 if arm.mode is VerifyMode.GREEDY else 0.9
    return generate(
        engine,
        drafter,
        PROMPT,
        arm,
        SamplingParams(temperature=temperature, seed=3, mode=arm.mode),
        draft_length=3,
        max_nodes=6 if drafter_dir else 0,
        max_tokens=24,
        stop_token_ids=frozenset(),
    )


class SentModel(ToyModel):
    """What an independent drafter says it draws from, after a text and for every path behind it.

    Asked of the drafter itself: seed after seed is tried until it draws the path, and what it sends for the next token
    is taken. Behind a draft's last token nothing is drawn, and anything will do.
    """

    def __init__(self, drafter: Drafter, text: Sequence[int], vocab: int, depth: int) -> None:
        super().__init__(0, vocab)
        self._drafter = drafter
        self._text = list(text)
        self._depth = depth
        self._sent: dict[Prefix, DraftDistribution] = {}

    def distribution(self, prefix: Prefix) -> DraftDistribution:
        for seed in range(500):
            if prefix in self._sent:
                return self._sent[prefix]
            sampling = SamplingParams(temperature=3.0, seed=seed, mode=VerifyMode.REJECTION)
            entry = fresh(self._drafter, self._text, len(prefix) + 1, sampling)
            assert entry.draft_dists is not None
            for place, draws in enumerate(entry.draft_dists):
                assert draws is not None
                assert isinstance(draws.distribution, DraftDistribution)
                self._sent.setdefault(entry.tokens[:place], draws.distribution)
        pytest.fail(f"the drafter never drew {prefix}")

    def _draw(self, prefix: Prefix) -> list[Fraction]:
        if len(prefix) >= self._depth:
            return [Fraction(1, self.vocab)] * self.vocab
        sent = self.distribution(prefix)
        assert sent.weights is not None
        total = int(sent.weights.sum())
        shares = {int(t): Fraction(int(w), total) for t, w in zip(sent.token_ids, sent.weights, strict=True)}
        return [shares.get(token, Fraction(0)) for token in range(self.vocab)]


TINY_TARGET = tiny_tokenizer(["a", "b", "Ġ", "ab", "Ġa"], [("a", "b"), ("Ġ", "a")], "Ġ")
TINY_OWN = tiny_tokenizer(["<unk>", "ba", "▁", "b", "a", "▁a"], [("b", "a"), ("▁", "a")], "▁")


@pytest.mark.parametrize("rule", [DrawRule.WITHOUT_REPLACEMENT, DrawRule.WITH_REPLACEMENT])
@pytest.mark.parametrize(
    ("shape", "depth"), [(((),), 1), ((((),),), 2), (((), ()), 1)], ids=["one", "chain", "siblings"]
)
@pytest.mark.parametrize("text", ["ab a", " b"])
def test_rejection_with_another_tokenizer_has_the_targets_law(
    text: str, shape: Shape, depth: int, rule: DrawRule, tmp_path: Path
) -> None:
    """By exact enumeration: every draw from what the drafter sends, every cell of the verifier's numbers."""
    target_dir = save_model(tmp_path / "target", TINY_TARGET, 5, seed=4)
    drafter = load(save_model(tmp_path / "own", TINY_OWN, 6, seed=5), target_dir)
    sent, target = SentModel(drafter, TINY_TARGET.encode(text).ids, 5, depth), ToyModel(6, 5)
    assert sent.fractions(())[3] == 0  # "ab" is no token of the drafter's, and the target may still write it
    assert target.fractions(())[3] > 0
    assert sum(1 for partition in sent.fractions(()) if partition) == 4
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for entry, prob in drawn_entries(sent, shape, rule):
        trie = DraftTrie(list(range(1, ROOT + 1)))
        trie.add(entry)
        for outcome in tree_outcomes(trie.select_drawn_tree(8, 8), target, sent, decide_tree):
            law[outcome.verdict.committed_tokens] += prob * outcome.prob
    assert sum(law.values()) == 1
    assert largest_gap(law, target, 3) < 1e-12


class TestAPartOfTheVocabulary:
    IDS = (3, 5, 8, *range(20, 60), 100, 200, 339)

    @pytest.fixture
    def reduced_dir(self, target_dir: Path, tmp_path: Path) -> Path:
        """A random model of the target's vocabulary that drafts 46 tokens of it."""
        save_model(tmp_path / "model", None, NUM_TARGET + 12, seed=7, tied=False)
        d2t = torch.tensor(self.IDS) - torch.arange(len(self.IDS))
        save_file({"d2t": d2t}, tmp_path / "model.safetensors")
        return write_config(tmp_path, target_dir, target_vocab=NUM_TARGET + 12, draft_vocab=len(self.IDS))

    def test_the_chain_is_the_models_own_over_the_part(self, target_dir: Path, reduced_dir: Path) -> None:
        drafter = load(reduced_dir, target_dir)
        assert drafter._model._head is not None
        wanted = reference(reduced_dir / "model", PROMPT, {own: own for own in self.IDS}, 6)
        entry = fresh(drafter, PROMPT, 6)
        assert list(entry.tokens) == [token for token, _ in wanted]
        assert entry.log_probs == pytest.approx([log_prob for _, log_prob in wanted], abs=1e-4)

    def test_draws_come_from_the_part(self, target_dir: Path, reduced_dir: Path) -> None:
        drafter = load(reduced_dir, target_dir)
        sampling = SamplingParams(temperature=1.0, seed=1, mode=VerifyMode.REJECTION)
        entry = fresh(drafter, PROMPT, 4, sampling)
        assert entry.draft_dists is not None
        for draws in entry.draft_dists:
            assert draws is not None
            assert isinstance(draws.distribution, DraftDistribution)
            assert set(draws.distribution.token_ids.tolist()) <= set(self.IDS)

    def test_corrections_outside_the_part_are_read(self, target_dir: Path, reduced_dir: Path) -> None:
        drafter = load(reduced_dir, target_dir)
        drafter.open(1, PROMPT)
        drafted = draft(drafter, 1, 4)
        committed = [*drafted.tokens[:2], 300]
        drafter.extend(1, len(PROMPT), committed)
        assert same(draft(drafter, 1, 4), fresh(drafter, [*PROMPT, *committed], 4))

    @pytest.mark.parametrize("offsets", [[0, -1], [400, 0], [5, 1]])
    def test_a_map_that_is_none_is_refused(
        self, target_dir: Path, reduced_dir: Path, offsets: list[int]
    ) -> None:
        save_file({"d2t": torch.tensor(offsets)}, reduced_dir / "model.safetensors")
        write_config(reduced_dir, target_dir, target_vocab=NUM_TARGET + 12, draft_vocab=2)
        with pytest.raises(CheckpointError, match="d2t"):
            load(reduced_dir, target_dir)

    def test_a_missing_map_is_named(self, target_dir: Path, reduced_dir: Path) -> None:
        (reduced_dir / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load(reduced_dir, target_dir)


class TestATransformersModel:
    def test_it_drafts_for_any_target_without_more(self, target_dir: Path, foreign_dir: Path) -> None:
        assert drafter_tap(foreign_dir) is None
        assert DrafterConfig.read(foreign_dir) == DrafterConfig("independent", ANY_TARGET)

    def test_of_the_targets_own_vocabulary_it_drafts_the_targets_text(self, target_dir: Path) -> None:
        entry = fresh(load(target_dir, target_dir), PROMPT, 5)
        model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
        ids = list(PROMPT)
        with torch.inference_mode():
            for _ in range(5):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert list(entry.tokens) == ids[len(PROMPT) :]

    def test_padding_may_differ_where_the_tokenizer_is_the_same(
        self, target_dir: Path, tmp_path: Path
    ) -> None:
        drafter = load(save_model(tmp_path, TARGET, NUM_TARGET + 3, seed=8), target_dir)
        assert drafter._draft_ids is not None
        assert drafter._draft_ids.tolist() == list(range(NUM_TARGET))
        assert max(fresh(drafter, [*PROMPT, NUM_TARGET + 10], 4).tokens) < NUM_TARGET

    def test_another_vocabulary_without_a_tokenizer_is_refused(
        self, target_dir: Path, tmp_path: Path
    ) -> None:
        save_model(tmp_path, None, NUM_TARGET, seed=8)
        with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
            load(tmp_path, target_dir)

    def test_pickled_weights_are_refused_with_a_way_out(
        self, target_dir: Path, foreign_dir: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text((foreign_dir / "config.json").read_text())
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
        with pytest.raises(CheckpointError, match="save_pretrained"):
            load(tmp_path, target_dir)

    def test_what_is_no_language_model_is_refused(self, target_dir: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
        with pytest.raises(CheckpointError, match="no causal language model"):
            load(tmp_path, target_dir)

    def test_the_engine_says_what_it_cannot_run(
        self, target_dir: Path, foreign_dir: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text((foreign_dir / "config.json").read_text())
        save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="no tensor"):
            load(tmp_path, target_dir)

    def test_prune_head_is_a_truth_value(self, target_dir: Path, foreign_dir: Path, tmp_path: Path) -> None:
        (tmp_path / "model").symlink_to(foreign_dir)
        write_config(tmp_path, target_dir, target_vocab=NUM_TARGET + 12, prune_head="yes")
        with pytest.raises(CheckpointError, match="prune_head"):
            load(tmp_path, target_dir)


NUM_REAL_TOKENS = 16


@pytest.mark.slow
@pytest.mark.skipif(cached("gemma3-270m") is None, reason="needs `paceline models fetch gemma3-270m`")
def test_a_real_model_of_another_family_drafts_for_the_default_target() -> None:
    """Gemma 3 270M (262,144 tokens) beside SmolLM2-135M: it is right now and then, and the text is the target's."""
    target_dir, own_dir = resolve(DEFAULT_MODEL), resolve("gemma3-270m")
    engine = TargetEngine.load(target_dir, "cpu", torch.bfloat16)
    drafter = load_drafter(own_dir, target_dir, dtype=torch.bfloat16)
    assert isinstance(drafter, IndependentDrafter)
    assert drafter._draft_ids is not None
    assert len(drafter._draft_ids) > 40_000
    tokenizer = Tokenizer.from_file(str(target_dir / "tokenizer.json"))
    prompt = tokenizer.encode(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ).ids
    for arm, temperature in ((GREEDY_ARMS[0], 0.0), (ARMS[0], 0.8)):
        texts, tallies = [], []
        for max_nodes in (4, 0):
            tallies.append(Tally())
            texts.append(
                generate(
                    engine,
                    drafter if max_nodes else None,
                    prompt,
                    arm,
                    SamplingParams(temperature=temperature, seed=3, mode=arm.mode),
                    draft_length=4,
                    max_nodes=max_nodes,
                    max_tokens=NUM_REAL_TOKENS,
                    stop_token_ids=frozenset(),
                    watch=tallies[-1].add,
                )
            )
        assert texts[0] == texts[1]
        assert tallies[0].num_passes < tallies[1].num_passes == NUM_REAL_TOKENS
