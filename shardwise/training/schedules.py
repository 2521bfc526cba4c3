"""Learning rates, as pure functions of the update: there is no scheduler state to save."""

from __future__ import annotations

import math

from shardwise.training.config import TrainConfig


def learning_rate(update: int, config: TrainConfig, peak: float) -> float:
    """The learning rate of an update.

    A linear warm-up to `peak`, then the schedule's fall to `min_lr * peak`, which it would reach at `steps`: no update
    is wasted on a rate of zero. "wsd" is flat and falls as 1 - sqrt over the last `decay` of the steps (arXiv
    2405.18392, section 3); "cosine" is arXiv 1608.03983, equation 5, with one period.

    Args:
        update: updates applied so far. A skipped step is no update.
        config: schedule, steps, warmup, min_lr, decay.
        peak: the learning rate at the end of the warm-up.
    """
    if update < config.warmup:
        return peak * (update + 1) / config.warmup
    return peak * (config.min_lr + (1 - config.min_lr) * _height(update, config))


def _height(update: int, config: TrainConfig) -> float:
    """How far the schedule stands above its end: 1 at the end of the warm-up, 0 at the last step."""
    if config.schedule == "constant":
        return 1.0
    start = config.warmup
    if config.schedule == "wsd":
        start = max(start, config.steps - round(config.decay * config.steps))
    if update < start:
        return 1.0
    done = min(1.0, (update - start) / max(1, config.steps - start))
    if config.schedule == "wsd":
        return 1 - math.sqrt(done)
    if config.schedule == "linear":
        return 1 - done
    return 0.5 * (1 + math.cos(math.pi * done))
