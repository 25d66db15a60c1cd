"""Other people's clients against a served `/v1`: `python -m tests.app.try_clients OTHER_PYTHON`.

See `foreign_clients` for what OTHER_PYTHON must have installed; the exit status is that of its steps.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.app.try_api import serving


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(
            "Name the Python whose environment has the clients: see tests/app/foreign_clients.py."
        )
    clients = Path(__file__).with_name("foreign_clients.py")
    with serving() as server:
        done = subprocess.run([sys.argv[1], str(clients), server.url], timeout=540, check=False)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
