"""Generate several completions at once with the asynchronous client, and cancel one early.

Start a deployment with ``paceline up``, then: python docs/examples/generate_async.py [HOST:PORT]
"""

import asyncio
import sys
from contextlib import aclosing

from paceline.client import AsyncPacelineClient, Chunk


async def main(endpoint: str) -> None:
    async with AsyncPacelineClient(endpoint, timeout_s=120) as client:
        prompts = ["One, two, three,", "The capital of France is", "def add(a, b):"]
        completions = await asyncio.gather(*(client.complete(prompt, max_tokens=16) for prompt in prompts))
        for prompt, completion in zip(prompts, completions, strict=True):
            print(f"{prompt!r} -> {completion.text!r} ({completion.finish_reason})")

        # Leaving the block cancels the generation on the server.
        num_chunks = 0
        async with aclosing(client.generate("Count to a hundred: 1, 2,", max_tokens=200)) as events:
            async for event in events:
                num_chunks += isinstance(event, Chunk)
                if num_chunks == 3:
                    break
        print("ended after", num_chunks, "chunks")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50050"))
