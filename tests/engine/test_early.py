"""What begins before torch is imported, and where it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import early
from engine.types import EngineConfig
from kernels import amx_build


@pytest.mark.parametrize(
    ("config", "driver", "begins"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"device": "cpu"}, True, True),
        ({"device": "cuda"}, False, False),
        ({"backend": "torch_cpu"}, False, True),
        ({"backend": "reference"}, False, False),
        ({"backend": "triton"}, False, False),
    ],
)
def test_it_begins_where_steps_will_run_on_the_processor(
    config: dict[str, Any], driver: bool, begins: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(amx_build, "begin", lambda: begun.append(True))
    monkeypatch.setattr(early, "_GPU_DRIVER", tmp_path if driver else tmp_path / "none")
    early.begin(EngineConfig(**config))
    assert bool(begun) is begins


def test_nothing_heavy_is_imported_for_it() -> None:
    code = "import sys, engine.early; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
