"""PipeDream: 1F1B that never flushes, with several weight versions at once (1806.03377; 2BW: 2006.09503)."""

from __future__ import annotations

from dataclasses import replace

from shardwise.pipeline_parallel.actions import Action, Kind, Row, Rows, Schedule, Weights, linear, shift, unroll


def pipedream(num_stages: int, num_microbatches: int, vertical_sync: bool = False) -> Schedule:
    """Update after every microbatch; rank i keeps p - i weight versions and activations (1806.03377 section 3.3).

    With weight stashing a microbatch's forward and backward use the newest weights that its forward finds on each
    stage; with `vertical_sync` every stage uses the version that the first stage used.
    """
    weights = Weights.VERTICAL if vertical_sync else Weights.LATEST
    return _stream("pipedream", num_stages, num_microbatches, 1, weights)


def pipedream_2bw(num_stages: int, num_microbatches: int) -> Schedule:
    """Update after every m microbatches, two weight versions: W(k + 1) = W(k) - lr grad f(W(k - 1)) (2006.09503 3.1).

    Raises:
        ValueError: fewer microbatches than stages, for which two versions do not suffice.
    """
    if num_microbatches < num_stages:
        raise ValueError(
            f"pipedream-2bw keeps two weight versions, which takes at least as many microbatches as stages: "
            f"microbatches = {num_microbatches} is below {num_stages}; raise it or use pipedream"
        )
    return _stream("pipedream-2bw", num_stages, num_microbatches, num_microbatches, Weights.DOUBLE)


def _stream(name: str, num_stages: int, num_microbatches: int, every: int, weights: Weights) -> Schedule:
    """1F1B as an endless stream, cut into steps of m forwards, with an update after each `every`-th backward."""
    p, m = num_stages, num_microbatches
    following, drain = [], []
    for rank in range(p):
        ahead = p - 1 - rank
        step: list[Action] = []
        for j in range(m):
            step += [Action(Kind.F, j), *_backward(j - ahead, every)]
        following.append(tuple(step))
        drain.append(tuple(action for j in range(-ahead, 0) for action in _backward(j, every)))
    rounds = shift(tuple(following), 0), tuple(following), tuple(drain)
    empty: Rows = ((),) * p
    schedule = Schedule(name, p, 1, m, linear(p), empty, asynchronous=True, weights=weights, rounds=rounds)
    return replace(schedule, rows=unroll(schedule, 1).rows)


def _backward(microbatch: int, every: int) -> Row:
    """A backward and the update that follows the last one of each `every`."""
    backward = Action(Kind.BW, microbatch)
    return (backward,) if (microbatch + 1) % every else (backward, Action(Kind.U, microbatch))
