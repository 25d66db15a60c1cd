"""20,000 random operations on the real memory, each checked against the oracle (see `tests.engine.machine`).

The long run of the same machine is `python -m tests.engine.long_run --operations 200000`.
"""

from __future__ import annotations

from collections import Counter

from tests.engine.machine import NEEDED, run


def test_twenty_thousand_operations() -> None:
    totals: Counter[str] = Counter()
    while totals["operations"] < 20_000:
        totals.update(run(examples=40))
    missing = [name for name in NEEDED if not totals[name]]
    assert not missing, f"the run was vacuous: {missing} of {totals}"
    assert totals["lower_bound"] > 10, "hits were hardly ever held to their lower bound"
