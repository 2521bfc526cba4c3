"""The suite: `python -m tests`, in two processes side by side; with arguments, `pytest` with these, in one.

Tests that come one after another keep 1.2 of two cores busy: many run on one rank, and ranks wait for each other. Each
process has a pool of ranks of its own. The output of the second follows that of the first.
"""

import os
import subprocess
import sys
import tempfile

# About half of the suite's time.
HALF = ("tests/memory", "tests/data_parallel", "tests/tensor_parallel", "tests/optimizers")
PYTEST = (sys.executable, "-m", "pytest")


def main() -> int:
    """Returns the exit status: that of the first process that fails."""
    if sys.argv[1:] or (os.cpu_count() or 1) < 2:
        return subprocess.call([*PYTEST, *sys.argv[1:]])
    with tempfile.TemporaryFile() as output:
        second = subprocess.Popen([*PYTEST, *HALF], stdout=output, stderr=subprocess.STDOUT)
        try:
            status = subprocess.call([*PYTEST, "tests", *(f"--ignore={folder}" for folder in HALF)])
            return second.wait() or status
        finally:
            second.kill()
            output.seek(0)
            sys.stdout.write(output.read().decode(errors="replace"))
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
