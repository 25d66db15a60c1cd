"""The memory against its oracle, as long as you like: `python -m tests.engine.long_run --operations 200000`.

Every operation ends with the integrity check, exact fair shares in both views, and every sequence and
every indexed block read back token for token. Prints what happened; exits with 1 where a kind of event
that the run must contain did not occur.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.engine.machine import NEEDED, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first batch of worlds")
    options = parser.parse_args()
    began, seed = time.perf_counter(), options.seed
    totals: Counter[str] = Counter()
    while totals["operations"] < options.operations:
        totals.update(run(examples=100, seed=seed, shrink=False))
        seed += 1
        print(f"{totals['operations']:>9,} operations  {time.perf_counter() - began:7.0f} s", flush=True)
    for name, number in sorted(totals.items()):
        print(f"{name:>16}  {number:>12,}")
    missing = [name for name in NEEDED if not totals[name]]
    print(f"not seen: {', '.join(missing)}" if missing else "every needed kind of event occurred")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
