"""What a drafter is worth on held-out prompts: acceptance, time, bytes and speed, on the real engine in one process."""
