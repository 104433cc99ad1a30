"""Use sampling parameters, ask for several completions, and read log-probabilities.

Start a deployment with ``paceline up``, then: python docs/examples/sampling.py [HOST:PORT]
"""

import math
import sys

from paceline.client import PacelineClient

endpoint = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50050"

with PacelineClient(endpoint, timeout_s=120) as client:
    choices = client.complete_many(
        "The sea is",
        n=3,
        temperature=0.9,
        seed=7,
        frequency_penalty=0.5,
        bad_words=["blue"],
        min_tokens=8,
        max_tokens=20,
    )
    for choice in choices:
        print(f"seed {choice.seed}: {choice.text!r}")

    # Log-probabilities are those of the target's logits before temperature and penalties. Drafts do not change them.
    completion = client.complete("The capital of France is", max_tokens=4, log_probs=3, prompt_log_probs=0)
    for token in completion.log_probs:
        print(f"token {token.token_id}: probability {math.exp(token.log_prob):.3f}, rank {token.rank}")
    surprise = -sum(token.log_prob for token in completion.prompt_log_probs)
    print(f"prompt: {surprise:.2f} nats")
