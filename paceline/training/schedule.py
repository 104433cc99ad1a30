"""Learning rate over a run: linear warm-up, then a cosine down to a floor. Pure; called by the trainer."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, num_steps: int, warmup_steps: int, floor: float) -> float:
    """Factor on the peak rate for 0-based ``step``; ``floor`` at and after ``num_steps``."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
