"""Prometheus collectors: vLLM's names where vLLM has the metric, ``paceline_`` names for the others.

Responsible for: declaring every metric once and serving all of them over HTTP. Dashboards made for vLLM work unchanged.
Deliberately does not know: which process sets which metric (docs/metrics.md lists that).

Counters are exposed with the ``_total`` suffix, as vLLM's are: NUM_DRAFTS appears as
``vllm:spec_decode_num_drafts_total``. All collectors live in REGISTRY; one process serves one role.
"""

from __future__ import annotations

from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    start_http_server,
)

REGISTRY = CollectorRegistry()
for _collector in (GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR):
    REGISTRY.register(_collector)

_LATENCY_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_OVERHEAD_BUCKETS = (0.0001, 0.0002, 0.0004, 0.0006, 0.0008, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.05)
_STEP_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.008, 0.012, 0.016, 0.024),
    *(0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 4.096),
)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(name, text, ("model_name", *labels), registry=REGISTRY)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(name, text, ("model_name", *labels), registry=REGISTRY)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    return Histogram(name, text, ("model_name", *labels), buckets=buckets, registry=REGISTRY)


# vLLM's names: speculation (verifier)
NUM_DRAFTS = _counter(
    "vllm:spec_decode_num_drafts", "Target passes of a sequence with at least one draft token"
)
NUM_DRAFT_TOKENS = _counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that the target verified")
NUM_ACCEPTED_TOKENS = _counter(
    "vllm:spec_decode_num_accepted_tokens", "Draft tokens that the target accepted"
)
NUM_ACCEPTED_TOKENS_PER_POS = _counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "Accepted draft tokens by position in the draft, from 0",
    "position",
)

# vLLM's names: load (verifier)
NUM_REQUESTS_RUNNING = _gauge("vllm:num_requests_running", "Sequences that take part in steps")
NUM_REQUESTS_WAITING = _gauge("vllm:num_requests_waiting", "Sequences that wait for a KV slot")
NUM_PREEMPTIONS = _counter("vllm:num_preemptions", "Sequences that lost their KV slot to older ones")
KV_CACHE_USAGE = _gauge("vllm:kv_cache_usage_perc", "Fraction of the KV cache in use, from 0 to 1")
PREFIX_CACHE_QUERIES = _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
PREFIX_CACHE_HITS = _counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")
PROMPT_TOKENS = _counter("vllm:prompt_tokens", "Prompt tokens processed")
GENERATION_TOKENS = _counter("vllm:generation_tokens", "Tokens generated")
ITERATION_TOKENS = _histogram("vllm:iteration_tokens_total", "Rows in one target step", _ROW_BUCKETS)

# vLLM's names: requests (gateway)
REQUEST_SUCCESS = _counter("vllm:request_success", "Requests finished, by reason", "finished_reason")
REQUEST_PROMPT_TOKENS = _histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKEN_BUCKETS)
REQUEST_GENERATION_TOKENS = _histogram(
    "vllm:request_generation_tokens", "Tokens generated for a request", _TOKEN_BUCKETS
)
TIME_TO_FIRST_TOKEN = _histogram(
    "vllm:time_to_first_token_seconds", "From arrival to first token", _LATENCY_BUCKETS
)
INTER_TOKEN_LATENCY = _histogram(
    "vllm:inter_token_latency_seconds", "Between consecutive tokens", _LATENCY_BUCKETS
)
REQUEST_LATENCY = _histogram("vllm:e2e_request_latency_seconds", "From arrival to the end", _LATENCY_BUCKETS)
REQUEST_MAX_TOKENS = _histogram("vllm:request_params_max_tokens", "Token limit of a request", _TOKEN_BUCKETS)

# Paceline: gateway
REQUESTS_IN_FLIGHT = _gauge("paceline_requests_in_flight", "Requests at the gateway")
REQUEST_FAILURES = _counter("paceline_request_failures", "Requests that ended with an error status", "reason")

# Paceline: verifier
STEP_SECONDS = _histogram("paceline_step_seconds", "Whole target step", _STEP_BUCKETS)
FORWARD_SECONDS = _histogram("paceline_forward_seconds", "Forward pass of a target step", _STEP_BUCKETS)
DRAFT_WAIT_SECONDS = _counter("paceline_draft_wait_seconds", "Time that steps waited for drafts")
OVERHEAD_SECONDS = _histogram(
    "paceline_step_overhead_seconds",
    "Time between two target passes that was neither spent waiting nor drafting",
    _OVERHEAD_BUCKETS,
)
STEP_STAGE_SECONDS = _counter("paceline_step_stage_seconds", "Time of the step loop, by stage", "stage")
NODES_OFFERED = _counter(
    "paceline_draft_nodes_offered",
    "Draft nodes that could have been verified, by basis of the choice",
    "basis",
)
NODES_CHOSEN = _counter(
    "paceline_draft_nodes_chosen", "Draft nodes chosen to be verified, by basis of the choice", "basis"
)
STEP_POLICY_VERSION = _gauge(
    "paceline_step_policy_version", "Version of the policy that the last step followed"
)
DROPPED_DRAFTS = _counter(
    "paceline_dropped_draft_nodes",
    "Draft nodes that the committed text cannot use (ahead: cannot use yet), by cause",
    "cause",
)
NGRAM_TOKENS = _counter("paceline_ngram_tokens", "Verified tokens that only the n-gram proposal contained")
ACCEPTED_NGRAM_TOKENS = _counter(
    "paceline_accepted_ngram_tokens", "Verified n-gram tokens that the target accepted"
)
SPECULATION_CACHE_HITS = _counter(
    "paceline_speculation_cache_hits", "Commits whose next tokens had already been proposed"
)

PREFIXES_SHARED = _counter(
    "paceline_prefixes_shared",
    "Sequences that started from a cached prefix: adopted its slot, or copied it",
    "how",
)
CALIBRATION_ERROR = _gauge(
    "paceline_calibration_error",
    "Expected calibration error of draft confidences (kind: own, token or path), from 0 to 1",
    "drafter",
    "mode",
    "kind",
)

# Paceline: drafter
DRAFT_SECONDS = _histogram("paceline_draft_seconds", "One drafter round", _STEP_BUCKETS, "method")
DRAFT_QUEUE_SECONDS = _histogram(
    "paceline_draft_queue_seconds", "From a frame's arrival to drafting", _STEP_BUCKETS, "method"
)
DRAFTED_TOKENS = _counter(
    "paceline_drafted_tokens", "Tokens drafted; kind is answer, ahead or outcome", "method", "kind"
)
DRAFTER_SEQUENCES = _gauge("paceline_drafter_sequences", "Sequences that are open at the drafter", "method")

# Paceline: policy (scheduler publishes, verifier and conductor apply)
POLICY_VERSION = _gauge("paceline_policy_version", "Version of the policy in force", "method", "placement")
POLICY_DRAFT_LENGTH = _gauge(
    "paceline_policy_draft_length", "Draft length of the policy", "method", "placement"
)
POLICY_SPEEDUP = _gauge(
    "paceline_policy_expected_speedup",
    "Speed-up over plain decoding that the policy expects",
    "method",
    "placement",
)
POLICY_MEASURED_SPEEDUP = _gauge(
    "paceline_policy_measured_speedup",
    "Speed-up measured under the policy in force",
    "method",
    "placement",
)
TENANT_REQUESTS = _counter("paceline_tenant_requests", "Requests that ended, by tenant", "tenant")
TENANT_TOKENS = _counter("paceline_tenant_generation_tokens", "Tokens generated for a tenant", "tenant")
TENANT_DRAFT_TOKENS = _counter("paceline_tenant_draft_tokens", "Draft tokens verified for a tenant", "tenant")
TENANT_ACCEPTED_TOKENS = _counter(
    "paceline_tenant_accepted_tokens", "Draft tokens accepted for a tenant", "tenant"
)
TENANT_DECODE_SECONDS = _counter(
    "paceline_tenant_decode_seconds", "From first to last token, summed over a tenant's requests", "tenant"
)
REPORT_FRAMES = _counter("paceline_report_frames", "Measurement frames: taken or refused", "outcome")

# Paceline: Redis, without a model
REDIS_CONNECTED = Gauge("paceline_redis_connected", "1 while Redis can be reached", registry=REGISTRY)
REDIS_FAILURES = Counter(
    "paceline_redis_failures", "Redis operations that failed", ("kind",), registry=REGISTRY
)


def serve_metrics(host: str, port: int) -> tuple[WSGIServer, Thread, int]:
    """Serve REGISTRY at ``http://host:port/metrics``; returns the server, its thread and bound port."""
    server, thread = start_http_server(port, addr=host, registry=REGISTRY)
    return server, thread, int(server.server_port)
