"""The learning rate of each step, as a factor of `optimizer.learning_rate`."""

import math

from motet.train.optimizer.optimizer_settings import LearningRateScheduleSettings


def learning_rate_factor(schedule: LearningRateScheduleSettings, step: int, total_steps: int) -> float:
    """The factor of step 0..steps-1. Warm-up reaches 1 at its last step; a fall reaches its end at the last step."""
    warmup = min(schedule.warmup_steps, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    decay_start = warmup
    if schedule.kind == "warmup-stable-decay":
        length = schedule.decay_steps if schedule.decay_steps is not None else max(1, total_steps // 5)
        decay_start = max(warmup, total_steps - length)
        if step < decay_start:
            return 1.0
    progress = min(1.0, (step - decay_start + 1) / (total_steps - decay_start))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1 - progress
    return schedule.final_fraction + (1 - schedule.final_fraction) * remaining
