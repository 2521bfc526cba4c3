"""The program of a rank that `shardwise train` starts. Run as a file, so its first lines come before torch is read."""

import os
import signal
import sys


def _leave(number: int, frame: object) -> None:
    # Training has not begun: there is nothing to save.
    os._exit(0)


def main(path: str) -> None:
    """Runs the job that was pickled to `path`."""
    signal.signal(signal.SIGINT, _leave)

    import pickle

    from shardwise.training import launch, processes

    with open(path, "rb") as file:
        order: launch.Order = pickle.load(file)
    processes.die_with(order.parent)
    launch.run_rank(order)


if __name__ == "__main__":
    main(sys.argv[1])
