"""Prometheus metrics of the step loop; the names are vLLM's where vLLM has them (see docs/metrics.md)."""

from __future__ import annotations

from services.runtime import metrics
from services.verifier.budget import Basis
from services.verifier.calibration import Calibrators
from services.verifier.report import CommitReport, StepEvent, StepStats
from services.verifier.stopwatch import StepStage, overhead_s

_CALIBRATION_PERIOD = 16  # steps between two updates of errors that change slowly


class StepObserver:
    """Counts what each step did. Any thread may call it, because it reads nothing that a step changes."""

    def __init__(self, model_name: str, calibrators: Calibrators) -> None:
        self._name = model_name
        self._calibrators = calibrators
        self._step_seconds = metrics.STEP_SECONDS.labels(model_name)
        self._forward_seconds = metrics.FORWARD_SECONDS.labels(model_name)
        self._draft_wait_seconds = metrics.DRAFT_WAIT_SECONDS.labels(model_name)
        self._overhead_seconds = metrics.OVERHEAD_SECONDS.labels(model_name)
        self._stage_seconds = {
            stage: metrics.STEP_STAGE_SECONDS.labels(model_name, stage.value) for stage in StepStage
        }
        self._num_rows = metrics.ITERATION_TOKENS.labels(model_name)
        self._num_running = metrics.NUM_REQUESTS_RUNNING.labels(model_name)
        self._num_waiting = metrics.NUM_REQUESTS_WAITING.labels(model_name)
        self._num_preemptions = metrics.NUM_PREEMPTIONS.labels(model_name)
        self._prefix_queries = metrics.PREFIX_CACHE_QUERIES.labels(model_name)
        self._prefix_hits = metrics.PREFIX_CACHE_HITS.labels(model_name)
        self._prefixes_adopted = metrics.PREFIXES_SHARED.labels(model_name, "adopted")
        self._prefixes_copied = metrics.PREFIXES_SHARED.labels(model_name, "copied")
        self._kv_usage = metrics.KV_CACHE_USAGE.labels(model_name)
        self._prompt_tokens = metrics.PROMPT_TOKENS.labels(model_name)
        self._generation_tokens = metrics.GENERATION_TOKENS.labels(model_name)
        self._policy_version = metrics.STEP_POLICY_VERSION.labels(model_name)
        self._nodes_offered = {b: metrics.NODES_OFFERED.labels(model_name, b) for b in Basis}
        self._nodes_chosen = {b: metrics.NODES_CHOSEN.labels(model_name, b) for b in Basis}
        self._drafts = metrics.NUM_DRAFTS.labels(model_name)
        self._draft_tokens = metrics.NUM_DRAFT_TOKENS.labels(model_name)
        self._accepted_tokens = metrics.NUM_ACCEPTED_TOKENS.labels(model_name)
        self._cache_hits = metrics.SPECULATION_CACHE_HITS.labels(model_name)
        self._ngram_tokens = metrics.NGRAM_TOKENS.labels(model_name)
        self._accepted_ngram_tokens = metrics.ACCEPTED_NGRAM_TOKENS.labels(model_name)

    def observe(self, event: StepEvent) -> None:
        """Record one step."""
        stats, commits, dropped = event.stats, event.commits, event.dropped
        laps = stats.laps
        self._step_seconds.observe(stats.step_s)
        self._forward_seconds.observe(laps[StepStage.FORWARD])
        self._draft_wait_seconds.inc(laps[StepStage.DRAFT_WAIT])
        self._overhead_seconds.observe(overhead_s(laps))
        for stage, seconds in laps.items():
            self._stage_seconds[stage].inc(seconds)
        self._num_rows.observe(stats.num_rows)
        self._num_running.set(event.num_running)
        self._observe_kv_allocator(stats)
        self._policy_version.set(stats.policy_version)
        if (choice := stats.choice) is not None:
            self._nodes_offered[choice.basis].inc(choice.num_offered)
            self._nodes_chosen[choice.basis].inc(choice.num_chosen)
        if stats.kv_usage is not None:
            self._kv_usage.set(stats.kv_usage)
        self._prompt_tokens.inc(stats.num_prefill_rows)
        self._generation_tokens.inc(sum(len(commit.tokens) for commit in commits))
        for cause in ("stale", "old_epoch", "malformed", "ahead"):
            if count := getattr(dropped, cause):
                metrics.DROPPED_DRAFTS.labels(self._name, cause).inc(count)
        if stats.step_index % _CALIBRATION_PERIOD == 0:
            for (mode, kind), error in self._calibrators.errors().items():
                labels = (self._name, self._calibrators.drafter, mode, kind)
                metrics.CALIBRATION_ERROR.labels(*labels).set(error)
        for commit in commits:
            if commit.num_draft_tokens:
                self._observe_draft(commit)

    def _observe_kv_allocator(self, stats: StepStats) -> None:
        self._num_waiting.set(stats.num_waiting)
        self._num_preemptions.inc(stats.kv_allocator.num_preemptions)
        self._prefix_queries.inc(stats.kv_allocator.num_looked_up_tokens)
        self._prefix_hits.inc(stats.kv_allocator.num_reused_tokens)
        self._prefixes_adopted.inc(stats.kv_allocator.num_adopted)
        self._prefixes_copied.inc(stats.kv_allocator.num_copied)

    def _observe_draft(self, commit: CommitReport) -> None:
        self._drafts.inc()
        self._draft_tokens.inc(commit.num_draft_tokens)
        self._accepted_tokens.inc(commit.num_accepted_tokens)
        self._cache_hits.inc(int(commit.is_cache_hit))
        self._ngram_tokens.inc(commit.num_ngram_tokens)
        self._accepted_ngram_tokens.inc(commit.num_accepted_tokens - commit.num_accepted_of_drafter)
        for position in range(commit.num_accepted_tokens):
            metrics.NUM_ACCEPTED_TOKENS_PER_POS.labels(self._name, str(position)).inc()
