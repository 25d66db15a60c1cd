"""`coread` whose engine thread can be ended by SIGUSR1: `python -m bench.faulty_server serve …`.

From outside a process no thread of it can be killed. Here a signal raises `SystemExit` in the engine's
thread, wherever it is: in the middle of a step, as a fault of ours or of a library would end it.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from types import FrameType

from app.cli import app


def end_engine(_signal: int, _frame: FrameType | None) -> None:
    """Raise `SystemExit` in the engine's thread; nothing happens where there is none."""
    for thread in threading.enumerate():
        if thread.name == "coread-engine" and thread.ident is not None:
            raised = ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), raised)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, end_engine)
    app()
