"""One step of the target: the order of its stages.

Responsible for: calling the stages in order, which `StepRunner.run` lists, and timing them. The runner never waits for
a drafter longer than the policy's wait budget. A draft can cost a step time, but it never changes what is committed.

Deliberately does not know: gRPC, Ray, Redis, threads, how a stage does its work.

Called by: the step loop's thread; tests call `run` themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.contract.policy import StepPolicy
from paceline.target import KVCacheFullError, StepOutput, TargetEngine
from paceline.v1 import target_pb2
from services.verifier.budget import NodeBudget, NodeChoice
from services.verifier.calibration import Calibrators
from services.verifier.colocated import ColocatedDrafter
from services.verifier.commands import CommandHandler
from services.verifier.commit import StepCommitter
from services.verifier.feature_hub import FeatureHub
from services.verifier.inbox import VerifierInbox
from services.verifier.log_probs import log_prob_messages, log_prob_spans
from services.verifier.ngram import NgramProposers
from services.verifier.publisher import StepPublisher
from services.verifier.report import CommitReport, StepEvent, StepStats
from services.verifier.schedule import StepInput, keep_worthwhile_nodes, num_rows, schedule
from services.verifier.sequence import TargetSequence
from services.verifier.sequence_state import TargetSequenceState
from services.verifier.stopwatch import StepStage, Stopwatch
from services.verifier.table import SequenceLimits, TargetSequences
from services.verifier.verification import verify


class StepRunner:
    """Owns the engine, the sequences and their tries; everything in here happens on one thread.

    Args:
        engine: the target.
        inbox: commands from the network side.
        features: logs of the sequences' features, and who reads them.
        drafter: in this process; None where drafts come from elsewhere.
        budget: chooses the draft nodes of a step.
        limits: of the sequences.
        on_step: receives each step's event on the runner's thread.

    Attributes:
        table: the unfinished sequences.
        calibrators: give the confidences of drafts.
        num_steps: steps that have run.
        is_stopping: set by another thread to end a wait for drafts.
    """

    def __init__(
        self,
        engine: TargetEngine,
        inbox: VerifierInbox,
        features: FeatureHub,
        drafter: ColocatedDrafter | None,
        budget: NodeBudget,
        limits: SequenceLimits,
        on_step: Callable[[StepEvent], None],
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._drafter = drafter
        self._budget = budget
        self._publisher = publisher = StepPublisher(on_step)
        self.table = table = TargetSequences(engine, features, drafter, publisher, limits)
        self.calibrators = Calibrators("separate" if drafter is None else drafter.method)
        ngram = NgramProposers(limits.ngram_tokens)
        self._commands = CommandHandler(engine, table, features, publisher, self.calibrators, ngram)
        self._committer = StepCommitter(engine, table, features, drafter, budget)
        self._last_step_end_s = time.monotonic()
        self._watch = Stopwatch()
        self.num_steps = 0
        self.is_stopping = False

    def run(self) -> bool:
        """Run one step, stage by stage; False where no sequence runs.

        The caller has entered `torch.inference_mode`. The step's event is published later; see `publish`.
        """
        watch = self._watch
        self._take_commands()
        self.table.admit()
        watch.lap(StepStage.COMMANDS)
        if not self.table.running:
            self._publisher.publish()
            return False
        self._wait_for_drafts()
        watch.lap(StepStage.DRAFT_WAIT)
        inputs, choice = self._schedule()
        watch.lap(StepStage.SCHEDULE)
        inputs, output = self._forward(inputs)
        watch.lap(StepStage.FORWARD)
        if not inputs:  # the last sequence lost its slot; it will run again alone, or fail
            return True
        for drafts in self._inbox.drain_drafts():  # they continue from what this step commits
            self._commands.add_drafts(drafts)
        steps = verify(inputs, output)
        watch.lap(StepStage.VERIFY)
        self._committer.commit(steps, output, is_projected=self._policy.is_drafting)
        log_probs = log_prob_messages(log_prob_spans(steps, output.rows))
        self._last_step_end_s = watch.lap(StepStage.COMMIT)
        commits = [step.commit for step in steps if step.commit is not None]
        self._publish(self._measure(inputs, choice), inputs, commits, log_probs)
        self.table.drop_finished()
        watch.lap(StepStage.REPORT)
        self._draft(commits)
        return True

    def publish(self) -> None:
        """Publish the last step's event now, where the next step would do so."""
        self._publisher.publish()

    def idle(self) -> None:
        """Wait until a command arrives, unless the loop is to end."""
        if not self.is_stopping:
            self._inbox.wait_until(None)
        self._watch.lap(StepStage.IDLE)

    @property
    def _policy(self) -> StepPolicy:
        return self._commands.policy

    def _take_commands(self) -> None:
        """Carry out the commands that arrived since the last step."""
        for command in self._inbox.drain():
            self._commands.apply(command)

    def _wait_for_drafts(self) -> None:
        """Wait, at most for the policy's wait budget, while drafts are due."""
        if self._policy.wait_budget_us == 0 or self._drafter is not None:
            return
        deadline_s = self._last_step_end_s + self._policy.wait_budget_us * 1e-6
        while (due := [s for s in self.table.running if s.is_draft_due]) and not self.is_stopping:
            self._publisher.publish()
            if not self._inbox.wait_until(deadline_s):
                for sequence in due:
                    sequence.num_missed_waits += 1
                break
            self._take_commands()

    def _schedule(self) -> tuple[list[StepInput], NodeChoice]:
        """Rows of the next step: every running sequence, its worthwhile draft nodes, and prompts in chunks."""
        return keep_worthwhile_nodes(
            schedule(self.table.running, self._policy),
            self._policy,
            self._budget,
            overhead_s=self._watch.so_far(StepStage.DRAFT_WAIT, StepStage.DRAFT),
        )

    def _forward(self, inputs: list[StepInput]) -> tuple[list[StepInput], StepOutput]:
        """Run the step's rows, or fewer of them where the KV cache is full; no text depends on which.

        Kept prefixes give way first, then this step's drafts, then the slots of the youngest sequences.
        """
        while True:
            try:
                return inputs, self._engine.step(
                    [step_input.engine_rows() for step_input in inputs],
                    projects_features=self._policy.is_drafting,
                    on_begin=self._publisher.publish,
                )
            except KVCacheFullError:  # the engine ran nothing
                if self.table.kv_allocator.evict():
                    continue
                if any(len(step_input.tree) for step_input in inputs):
                    inputs = [step_input.without_drafts() for step_input in inputs]
                    continue
                preempted = self.table.preempt_youngest()
                inputs = [step_input for step_input in inputs if step_input.sequence is not preempted]

    def _measure(self, inputs: Sequence[StepInput], choice: NodeChoice) -> StepStats:
        """Sizes and times of the finished step; the node budget learns from them."""
        self.num_steps += 1
        cache = self._engine.cache
        stats = StepStats(
            step_index=self.num_steps,
            num_rows=num_rows(inputs),
            num_sequences=len(inputs),
            num_context_tokens=sum(step_input.sequence.num_cached for step_input in inputs),
            num_prefill_rows=sum(step_input.num_prefill_rows for step_input in inputs),
            laps=self._watch.take(),
            policy_version=self._policy.version,
            num_waiting=len(self.table.waiting),
            kv_allocator=self.table.kv_allocator.take_stats(),
            choice=choice,
            kv_usage=cache.used_bytes / cache.limit_bytes if cache.limit_bytes else None,
        )
        if not stats.num_prefill_rows:
            self._budget.observe_step(stats.num_rows, stats.step_s)
        return stats

    def _publish(
        self,
        stats: StepStats,
        inputs: Sequence[StepInput],
        commits: Sequence[CommitReport],
        log_probs: Sequence[tuple[TargetSequence, target_pb2.SequenceLogProbs]],
    ) -> None:
        """Hand the step's event to the publisher.

        It is urgent where a drafter elsewhere waits for it, while prompts run, and for first and last tokens.
        """
        present = [*(step_input.sequence for step_input in inputs), *self.table.waiting]
        event = StepEvent(
            stats,
            commits,
            sessions=list(dict.fromkeys(sequence.owner for sequence in present)),
            log_probs=[(sequence.owner, message) for sequence, message in log_probs],
            dropped=self.table.drops.take(),
            num_running=len(self.table.running),
        )
        drafter_waits = self._policy.is_drafting and self._drafter is None
        is_prefilling = stats.num_prefill_rows > 0
        self._publisher.put(event, is_urgent=drafter_waits or is_prefilling or event.has_first_or_last_token)

    def _draft(self, commits: Sequence[CommitReport]) -> None:
        """Let a drafter in this process continue from what was committed."""
        if self._drafter is None:
            return
        continuing = [
            commit
            for commit in commits
            if commit.sequence.state is TargetSequenceState.RUNNING and commit.sequence.may_draft
        ]
        num_drafted = self._drafter.draft(
            continuing, self._policy.draft_length, self._policy.max_nodes_per_sequence
        )
        # The cost of drafting is learned from this stage: a step without a draft would make drafts look free.
        self._watch.lap(StepStage.DRAFT if num_drafted else StepStage.REPORT)
