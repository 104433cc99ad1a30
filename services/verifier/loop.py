"""The step loop: the one thread that touches the target.

Each turn: take in commands, hold a moment if a draft is due and the policy allows it, choose the rows, run the
target once, verify, commit, report, and let a drafter in this process go on. It never waits for a drafter beyond the
policy's hold, and a draft can cost it time but never change what it commits. It knows nothing of gRPC, Ray or Redis.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog
import torch

from paceline.sampling import FinalKind, RuleError, Verdict
from paceline.target import KVCacheFullError, StepOutput, TargetEngine
from paceline.trie import EMPTY_TREE
from paceline.v1 import target_pb2
from services.verifier.budget import MODES_OF_DRAWS, Basis, NodeBudget, NodeChoice
from services.verifier.calibration import learn
from services.verifier.colocated import ColocatedDrafter
from services.verifier.features import FeatureHub, owned
from services.verifier.inbox import VerifierInbox
from services.verifier.log_probs import (
    LogProbSpan,
    committed_span,
    prompt_span,
    raw_rows,
    report_spans,
)
from services.verifier.policy import StepPolicy
from services.verifier.report import SequenceCommit, StepEvent, StepStats
from services.verifier.schedule import StepInput, num_rows, rows_of, schedule
from services.verifier.sequence import Finish, TargetSequence, TargetSequenceState
from services.verifier.step_clock import StepClock
from services.verifier.stopwatch import Stage, Stopwatch
from services.verifier.table import TargetSequences
from services.verifier.verdicts import judge

log = structlog.get_logger()

MAX_MISSED_WAITS = 2
"""A drafter that has let this many holds pass is not waited for again until a draft of its comes in."""


class StepLoop:
    """Owns the engine, the sequences and their tries; everything in here happens on one thread."""

    def __init__(
        self,
        engine: TargetEngine,
        inbox: VerifierInbox,
        table: TargetSequences,
        features: FeatureHub,
        drafter: ColocatedDrafter | None,
        budget: NodeBudget,
        on_step: Callable[[StepEvent], None],
        clock: StepClock | None = None,
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._table = table
        self._features = features
        self._drafter = drafter
        self._budget = budget
        self._on_step = on_step
        self._event: StepEvent | None = None  # that nobody has been told yet
        self._clock = clock or StepClock()
        self._policy = StepPolicy()
        self._choice = NodeChoice([], 0, 0, Basis.BUDGET)
        self._step_index = 0
        self._last_step_end_s = time.monotonic()
        self._watch = Stopwatch()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._on_start: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None

    def start(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Start the thread; it calls ``on_start`` first."""
        self._on_start = on_start
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finish the step in hand and end the thread."""
        self._stopping.set()
        self._inbox.wake()
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, for whatever reason."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._on_start()
            with torch.inference_mode():
                while not self._stopping.is_set():
                    if not self._turn():
                        self._inbox.wait_until(None)
                        self._watch.lap(Stage.IDLE)
            self._publish()
        except BaseException as error:  # the process must not go on without its loop
            self.failure = error
            log.exception("step loop failed")
            with suppress(Exception):
                self._publish()

    def turn(self, *, publishes: bool = True) -> bool:
        """Take in what has come, and run one step; False where there was nothing to run.

        The thread does so again and again; a test that calls it instead of starting the thread decides what comes in
        before each step.

        Args:
            publishes: whether to tell of the step at once; the thread leaves that to the next turn, where it may wait.
        """
        with torch.inference_mode():
            has_run = self._turn()
            if publishes:
                self._publish()
            return has_run

    def _turn(self) -> bool:
        watch = self._watch
        self._take_commands()
        self._table.admit()
        watch.lap(Stage.COMMANDS)
        if not self._table.running:
            self._publish()
            return False
        self._wait_for_drafts()
        watch.lap(Stage.DRAFT_WAIT)
        inputs = self._choose()
        started_s = watch.lap(Stage.CHOOSE)
        inputs, output = self._run_what_fits(inputs)
        if inputs:
            self._clock.stretch(started_s, num_rows(inputs))
        watch.lap(Stage.FORWARD)
        if not inputs:  # the last one gave its slot back; it is admitted anew, alone, or fails
            return True
        for drafts in self._inbox.drain_drafts():  # what came during the pass goes on from what it commits
            self._table.apply(drafts)
        commits, spans = self._commit(inputs, output)
        log_probs = report_spans(spans)
        self._last_step_end_s = watch.lap(Stage.COMMIT)
        self._report(inputs, commits, log_probs)
        self._table.drop_finished()
        watch.lap(Stage.REPORT)
        self._draft(commits)
        return True

    def _publish(self) -> None:
        """Wake whoever reads of the last step.

        As late as the pass begins, which lets the interpreter go: until then every thread that is woken takes it from
        this one. Before anything else is said or waited for, so that news stay in order.
        """
        if self._event is not None:
            event, self._event = self._event, None
            self._on_step(event)

    def _take_commands(self) -> None:
        commands = self._inbox.drain()
        if commands:
            self._publish()
        for command in commands:
            policy = self._table.apply(command)
            if policy is not None:
                self._policy = policy
                self._features.pause(not policy.is_drafting)

    def _wait_for_drafts(self) -> None:
        """Wait, at most the policy's hold, for sequences whose draft is due."""
        if self._policy.wait_budget_us == 0 or self._drafter is not None:
            return
        deadline_s = self._last_step_end_s + self._policy.wait_budget_us * 1e-6
        while (due := self._due()) and not self._stopping.is_set():
            if not self._inbox.wait_until(deadline_s):
                for sequence in due:
                    sequence.num_missed_waits += 1
                break
            self._take_commands()

    def _due(self) -> list[TargetSequence]:
        """Sequences whose draft is worth waiting for."""
        return [
            sequence
            for sequence in self._table.running
            if sequence.is_decoding
            and sequence.may_draft
            and sequence.num_tokens_left > 1
            and sequence.trie.num_nodes == 0
            and sequence.has_drafter
            and sequence.num_missed_waits < MAX_MISSED_WAITS
            and not sequence.is_sure_of_ngram
        ]

    def _choose(self) -> list[StepInput]:
        """Rows of the next step: every running sequence, its drafts as far as they pay, prompts in chunks."""
        policy = self._policy
        inputs = schedule(self._table.running, policy)
        modes = {turn.sequence.spec.sampling.resolved_mode for turn in inputs}
        committing = [turn for turn in inputs if turn.reaches_root]
        # The policy knows drafters; what is worth verifying of an n-gram proposal is left to the measured step times.
        num_ngram_nodes = sum(
            len(proposal.tokens) for turn in committing if (proposal := turn.sequence.proposal) is not None
        )
        self._choice = self._budget.choose(
            [turn.tree for turn in committing],
            is_rejection=not modes.isdisjoint(MODES_OF_DRAWS),
            max_nodes=policy.max_nodes_per_step + num_ngram_nodes,
            other_rows=sum(turn.num_settled for turn in inputs) - len(committing),
            overhead_s=self._watch.so_far(Stage.DRAFT_WAIT, Stage.DRAFT),
        )
        trees = iter(self._choice.trees)
        chosen = [next(trees) if turn.reaches_root else turn.tree for turn in inputs]
        return [
            turn if tree is turn.tree else replace(turn, tree=tree)
            for turn, tree in zip(inputs, chosen, strict=True)
        ]

    def _run_what_fits(self, inputs: list[StepInput]) -> tuple[list[StepInput], StepOutput]:
        """Run the step, and where the cache is full, less of it: none of this changes any text.

        Kept prefixes go first, then this step's drafts, then the slots of the youngest sequences.
        """
        while True:
            try:
                return inputs, self._forward(inputs)
            except KVCacheFullError:  # nothing was run
                self._publish()
                if self._table.kv_allocator.evict():
                    continue
                if any(len(turn.tree) for turn in inputs):
                    inputs = [replace(turn, tree=EMPTY_TREE) for turn in inputs]
                    continue
                preempted = self._table.preempt_youngest()
                inputs = [turn for turn in inputs if turn.sequence is not preempted]

    def _forward(self, inputs: list[StepInput]) -> StepOutput:
        rows = [rows_of(turn) for turn in inputs]
        return self._engine.step(rows, projects_features=self._projects_features, on_begin=self._publish)

    @property
    def _projects_features(self) -> bool:
        """Whether anybody reads features now; those that are only kept are projected if somebody ever does."""
        return self._policy.is_drafting

    def _commit(
        self, inputs: list[StepInput], output: StepOutput
    ) -> tuple[list[SequenceCommit], list[LogProbSpan]]:
        """Verify, keep the accepted rows, and move every sequence on; also whose log-probabilities are wanted."""
        deciding = [which for which, turn in enumerate(inputs) if turn.reaches_root]
        firsts = [output.firsts[which] + inputs[which].num_prompt_logits for which in deciding]
        raw = {
            which: raw_rows(inputs[which].sequence, output.rows, first, first + 1 + len(inputs[which].tree))
            for which, first in zip(deciding, firsts, strict=True)
        }
        spans: list[LogProbSpan] = []
        judged = judge(
            [inputs[which].sequence for which in deciding],
            [inputs[which].tree for which in deciding],
            output.rows,
            firsts,
            output.row_maxima,
        )
        verdicts = dict(zip(deciding, judged, strict=True))
        self._watch.lap(Stage.VERIFY)
        commits, settled = [], []
        failed: list[tuple[TargetSequence, RuleError]] = []
        for which, turn in enumerate(inputs):
            verdict = verdicts.get(which)
            if isinstance(verdict, RuleError):
                failed.append((turn.sequence, verdict))
                continue
            accepted = () if verdict is None else verdict.accepted_rows
            kept = [*range(turn.num_settled), *(turn.num_settled - 1 + row for row in accepted)]
            self._engine.keep(turn.sequence.slot, kept)
            start = turn.sequence.num_cached
            turn.sequence.num_cached += len(kept)
            if turn.num_prompt_logits:
                first = output.firsts[which]
                prompt_logits = output.rows[first : first + turn.num_prompt_logits]
                spans.append(prompt_span(turn.sequence, start, prompt_logits))
            going_on: Sequence[int] = ()  # tokens that a drafter may go on from
            if verdict is not None:
                try:
                    commits.append(self._settle(turn, verdict))
                except RuleError as error:
                    failed.append((turn.sequence, error))
                    continue
                if (rows_before_rules := raw[which]) is not None:
                    tokens = commits[-1].tokens
                    spans.append(committed_span(turn.sequence, rows_before_rules, verdict, tokens))
                if commits[-1].finish is Finish.NOT_YET:
                    going_on = commits[-1].tokens
            if output.features and turn.sequence.may_be_read:
                rows = output.features[which]
                if self._engine.taps[0].last_only:  # only what a draft can go on from is of use
                    start, kept = start + len(kept) - 1, kept[-1:] if going_on else []
                if kept:
                    kept_rows = rows[: len(kept)] if kept[-1] == len(kept) - 1 else rows[kept]
                    settled.append((turn.sequence, start, kept_rows, going_on))
            turn.sequence.propose_ngram()
        for (
            features
        ) in settled:  # one right after the other, so that a drafter can draft for all of them together
            self._hand_over(*features)
        for sequence, reason in failed:
            self._table.fail_rule(sequence, reason)
        return commits, spans

    def _hand_over(
        self, sequence: TargetSequence, start: int, rows: torch.Tensor, tokens: Sequence[int]
    ) -> None:
        """Features `[n, width]` of positions from `start` on, and the tokens committed with them, to the drafter."""
        if self._drafter is not None:
            if self._projects_features:
                self._drafter.feed(sequence.sequence_id, start, rows)
            else:
                rows = owned(rows)  # once for both
                self._drafter.keep(sequence.sequence_id, start, rows, self._engine.project)
        elif self._projects_features:
            rows = rows.cpu()
        self._features.append(sequence.sequence_id, start, rows, tokens, is_projected=self._projects_features)

    def _settle(self, turn: StepInput, verdict: Verdict) -> SequenceCommit:
        sequence = turn.sequence
        start = sequence.committed_length
        if len(turn.tree):
            self._budget.observe_draft(turn.tree, len(verdict.accepted_tokens))
        acceptance_samples = learn(sequence.calibrator, turn.tree, verdict.accepted_rows)
        accepted_rows = verdict.accepted_rows
        num_of_drafter = sum(1 for row in accepted_rows if turn.tree.is_drafted(row - 1))
        tokens, finish, num_dropped = sequence.commit(
            verdict.committed_tokens, is_whole_draft=verdict.kind is not FinalKind.RECOVERED
        )
        self._table.drops.stale += num_dropped
        return SequenceCommit(
            sequence=sequence,
            start=start,
            tokens=tokens,
            num_draft_tokens=len(turn.tree),
            draft_depth=max(turn.tree.depths, default=0),
            num_accepted_tokens=min(len(verdict.accepted_tokens), len(tokens)),
            num_ngram_tokens=turn.tree.num_ngram_nodes,
            drafter_depth=turn.tree.drafted_depth,
            num_accepted_of_drafter=min(num_of_drafter, len(tokens)),
            finish=finish,
            is_cache_hit=finish is Finish.NOT_YET and sequence.trie.num_nodes > 0,
            acceptance_samples=acceptance_samples,
        )

    def _report(
        self,
        inputs: list[StepInput],
        commits: list[SequenceCommit],
        log_probs: list[tuple[TargetSequence, target_pb2.SequenceLogProbs]],
    ) -> None:
        self._step_index += 1
        laps = self._watch.take()
        waiting, cache, drops = self._table.waiting, self._engine.cache, self._table.drops
        stats = StepStats(
            step_index=self._step_index,
            num_rows=num_rows(inputs),
            num_sequences=len(inputs),
            num_context_tokens=sum(turn.sequence.num_cached for turn in inputs),
            num_prefill_rows=sum(turn.num_settled - turn.reaches_root for turn in inputs),
            laps=laps,
            policy_version=self._policy.version,
            num_waiting=len(waiting),
            kv_allocator=self._table.kv_allocator.take_stats(),
            choice=self._choice,
            kv_usage=cache.used_bytes / cache.limit_bytes if cache.limit_bytes else None,
        )
        if not stats.num_prefill_rows:
            self._budget.observe_step(stats.num_rows, stats.step_s)
        present = [*(turn.sequence for turn in inputs), *waiting]
        self._event = StepEvent(
            stats,
            commits,
            sessions=list(dict.fromkeys(sequence.owner for sequence in present)),
            log_probs=[(sequence.owner, message) for sequence, message in log_probs],
            dropped=drops.take(),
            num_running=len(self._table.running),
        )
        is_awaited = self._policy.is_drafting and self._drafter is None
        if is_awaited or stats.num_prefill_rows or any(c.is_first or c.is_last for c in commits):
            self._publish()

    def _draft(self, commits: list[SequenceCommit]) -> None:
        """Let a drafter in this process go on from what was committed."""
        if self._drafter is None:
            return
        going_on = [
            c for c in commits if c.sequence.state is TargetSequenceState.RUNNING and c.sequence.may_draft
        ]
        policy = self._policy
        num_drafted = self._drafter.draft(
            going_on, policy.colocated_draft_length, policy.max_nodes_per_sequence
        )
        # What a draft takes is learned from this stage: a turn without one would make drafts look free.
        self._watch.lap(Stage.DRAFT if num_drafted else Stage.REPORT)
