"""How idle worker threads wait, decided before torch starts them.

GNU OpenMP's threads spin for a long while at the end of every parallel region. Where there are more busy
threads than cores, as with a web server beside the engine on a small machine, the spinner burns the very
core that the thread it waits for needs: a step was seen to take ten times as long. Waiting asleep costs a few
microseconds a region instead.
"""

from __future__ import annotations

import os


def wait_asleep() -> None:
    """Let OpenMP's threads wait without spinning for long, unless the environment says how they should.

    Has an effect only before torch is imported for the first time.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
