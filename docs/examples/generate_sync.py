"""Stream a completion with the synchronous client.

Start a deployment with ``paceline up``, then: python docs/examples/generate_sync.py [HOST:PORT]
"""

import sys

from paceline.client import Chunk, Finished, InvalidRequestError, PacelineClient

endpoint = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50050"

with PacelineClient(endpoint, timeout_s=120) as client:
    question = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
    for event in client.generate(question, max_tokens=60):
        if isinstance(event, Chunk):
            print(event.text, end="", flush=True)
        elif isinstance(event, Finished):
            print(f"\n[{event.reason}: {event.stats.tokens_per_pass:.2f} tokens per target pass]")

    # The same seed gives the same text, with and without drafts.
    first = client.complete("Once upon a time", max_tokens=20, temperature=0.8, seed=7)
    again = client.complete("Once upon a time", max_tokens=20, temperature=0.8, seed=7, speculation=False)
    print("same text:", first.text == again.text)

    try:
        client.complete("hello", temperature=-1.0)
    except InvalidRequestError as error:
        print("refused:", error.field)
