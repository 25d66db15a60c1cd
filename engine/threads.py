"""How idle worker threads wait, decided before torch starts them.

GNU OpenMP's threads spin for some 15 ms at the end of every parallel region. Where there are more busy
threads than cores, as with a web server beside the engine on a small machine, the spinner burns the very
core that the thread it waits for needs: a step was seen to take ten times as long. Threads that go to sleep
at once are no better: a step has some 200 regions a few hundred microseconds apart, and waking a thread for
each made the products of a decode take twice as long. So they spin for about as long as the gaps between the
regions of one step last, and no longer.
"""

from __future__ import annotations

import os

#: Turns of the spinning loop: some 0.1 to 0.5 ms, depending on what a pause instruction costs.
SPINS = 10_000


def spin_briefly() -> None:
    """Let OpenMP's threads spin for `SPINS` turns and then sleep, unless the environment says how to wait.

    Has an effect only before torch is imported for the first time.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
