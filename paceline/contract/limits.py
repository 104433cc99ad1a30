"""Limits and defaults that more than one process keeps, each written once with its unit and its reason.

A limit belongs here when two processes must agree on it, or when a comment of a proto names it. A limit that only one
file knows stays in that file. Tests compare the numbers in the protos, in the settings and in the chart with these.
"""

from __future__ import annotations

# Tokens and positions.

MAX_TOKEN_ID = 2**31 - 1
"""Token ids fit a signed 32-bit integer, as in every tokenizer."""
MAX_POSITIONS = 2**31 - 1
"""Positions fit a signed 32-bit integer."""

# Sampling parameters.

MAX_SEED = 2**64 - 1
"""The noise is keyed by 64 bits."""
MAX_TEMPERATURE = 100.0
"""A higher temperature gives a uniform distribution for all practical purposes."""
MAX_TOP_K = 2**31 - 1
MAX_PENALTY = 2.0
"""The range of OpenAI's API, from -2 to 2."""
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
"""The range of OpenAI's API, from -100 to 100."""
MAX_BIASES = 1024
"""Entries of a logit bias; vLLM takes as many."""
MAX_BAD_RUNS = 256
"""Each costs a comparison with the text per step and row."""
MAX_BAD_RUN_TOKENS = 32
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_CONSTRAINT_BYTES = 1 << 16
"""Bytes of a schema, an expression or a grammar, or of all choices together."""
MAX_CONSTRAINT_CHOICES = 1024
MAX_TOP_LOG_PROBS = 20
"""Alternatives beside each token, as in OpenAI's API."""
DEFAULT_TYPICAL_EPSILON = 0.09
"""Medusa's own value (Cai et al., 2401.10774)."""
DEFAULT_TYPICAL_DELTA = 0.3
"""Medusa's own value."""

# Requests.

DEFAULT_MAX_TOKENS = 128
MAX_COMPLETIONS = 16
"""Completions of one prompt."""
MAX_STOP_CONDITIONS = 8
MAX_STOP_TEXT_BYTES = 256
MAX_STOP_TOKENS = 64
"""Stop tokens of a sequence: a request's own and the model's end tokens."""
MAX_MESSAGES = 4096
"""Turns of a chat."""
MAX_STREAM_INTERVAL = 1024
"""Tokens that are sent together."""
MAX_REQUEST_ID_CHARACTERS = 64
MAX_TENANT_CHARACTERS = 64
MAX_TENANTS = 64
"""Tenants with statistics of their own; each is a label of a metric."""
MAX_DRAFTER_CHARACTERS = 256
"""A request names a drafter by name, method or endpoint; a host name alone may have 253 characters."""

# Drafts.

MAX_DRAFT_LENGTH = 64
"""Tokens in a row per draft. A depth then fits the 6 bits that an acceptance sample gives it."""
MAX_DRAFT_NODES = 64
"""Draft nodes of one sequence in one step. The conductor never sends more, and larger trees have never paid."""
MAX_STEP_NODES = 1024
"""Draft nodes over all sequences of one step. The verifier adds the tokens of n-gram proposals to this limit."""
MAX_OUTCOMES = 64
"""Verification outcomes of one step that are drafted past."""
MAX_PARTITIONS = 64
"""Drafters that share the outcomes of one sequence."""
MAX_SUPPORT_TOKENS = 256
"""Tokens with a weight in one draft distribution on the wire."""
MAX_SUPPORT_CONFIDENCE = 1000
"""Confidences of draft distributions travel in thousandths."""

# The policy.

DEFAULT_DRAFT_LENGTH = 4
"""Tokens per draft before a scheduler has decided."""
DEFAULT_STEP_NODES = 64
"""Draft nodes over all sequences of one step before a scheduler has decided, beside n-gram proposals."""
DEFAULT_WAIT_BUDGET_US = 20_000
"""Microseconds; wait budget before a scheduler has decided."""
MAX_WAIT_BUDGET_US = 1_000_000
"""Microseconds. A longer wait looks like a hung verifier."""
DEFAULT_PREFILL_TOKENS = 256
"""Prompt tokens in one step. Running sequences wait while a step runs them, and 256 rows keep that wait short."""
MAX_PREFILL_TOKENS = 65536

# Processes.

DEFAULT_MAX_SEQUENCES = 256
"""Sequences that a verifier, a drafter or a conductor holds at once."""
MAX_SEQUENCES = 65536
MAX_THREADS = 1024
"""torch threads of a process."""

# Streams.

MIN_LEASE_MS = 1_000
"""Milliseconds. A shorter lease runs out in a garbage collection or a slow step."""
MAX_LEASE_MS = 600_000
"""Milliseconds. A lost conductor's sequences hold their KV cache for so long."""
MAX_MESSAGE_BYTES = 64 << 20
"""Bytes of one gRPC message, in both directions."""
KEEPALIVE_TIME_MS = 10_000
"""Milliseconds between two pings of a client; servers accept a ping every 5 s."""
KEEPALIVE_TIMEOUT_MS = 5_000
PING_TIMEOUT_MS = 5_000
"""Milliseconds. Without it gRPC notices a frozen peer after 60 s; with it, after 5 s (grpcio 1.85)."""

# Measurements.

MAX_REPORT_ITEMS = 4096
"""Items of each list in one frame of a report."""
MAX_MEASURED_US = 600_000_000
"""Microseconds. A longer time is not a measurement; the scheduler refuses the whole frame that has one."""
MAX_CONTEXT_TOKENS = 1 << 40
"""Positions attended to in one step, summed over its sequences."""
MAX_LABEL_CHARACTERS = 200
"""Characters of a name in a report: a model, a device, a method, a peer."""
MAX_PEER_PAIRS = 64
"""Pairs of conductor and drafter whose round trips are kept apart."""
MAX_REPORTED_DRAFTERS = 32
"""Drafters whose acceptance is kept apart."""
