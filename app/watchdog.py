"""Starts the engine again when its thread has died: whoever asked is told at once, the next is answered."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from app.http_errors import sentence
from app.rates import Rate

if TYPE_CHECKING:
    from app.runtime import Runtime

log = logging.getLogger("coread")
#: An engine that dies more often has a fault that a restart does not cure; it then stays down, and says why.
MAX_RESTARTS, WITHIN_S = 5, 600.0


async def watch_engine(runtime: Runtime, every_s: float = 1.0) -> None:
    """Look every `every_s` seconds until cancelled."""
    restarts, gave_up = Rate(MAX_RESTARTS, WITHIN_S), False
    while True:
        await asyncio.sleep(every_s)
        if not runtime.engine_failed:
            gave_up = False
            continue
        if restarts.take("engine"):
            if not gave_up:
                log.error("the engine failed %d times within minutes; it is left alone now", MAX_RESTARTS)
            gave_up = True
            continue
        try:
            if await runtime.revive():
                log.warning("the engine had failed and was started again with an empty memory")
        except Exception as error:
            log.error("the engine could not be started again: %s", sentence(error))
