"""The learning rate of each step, as a factor of `optimizer.learning_rate`."""

import math

from motet.train.settings import ScheduleSettings


def learning_rate_factor(settings: ScheduleSettings, step: int, steps: int) -> float:
    """The factor of step 0..steps-1. Warm-up reaches 1 at its last step; a fall reaches its end at the last step."""
    warmup = min(settings.warmup_steps, steps)
    if step < warmup:
        return (step + 1) / warmup
    if settings.kind == "constant":
        return 1.0
    fall_from = warmup
    if settings.kind == "warmup-stable-decay":
        length = settings.decay_steps if settings.decay_steps is not None else max(1, steps // 5)
        fall_from = max(warmup, steps - length)
        if step < fall_from:
            return 1.0
    progress = min(1.0, (step - fall_from + 1) / (steps - fall_from))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if settings.kind == "cosine" else 1 - progress
    return settings.final_fraction + (1 - settings.final_fraction) * remaining
