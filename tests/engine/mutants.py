"""The memory core with one line changed, loaded beside the real one."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

#: In order of their imports. Everything else (types, errors, the kernels) stays the real thing.
MODULES = (
    "engine.extents",
    "engine.blocks",
    "engine.sequence",
    "engine.prefix_tree",
    "engine.block_events",
    "engine.memory",
    "engine.scheduler",
    "engine.ledger",
    "engine.integrity",
    "tests.engine.oracle",
    "tests.engine.simulation",
    "tests.engine.world",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Replace `old`, which must occur exactly once in the source of `module`, by `new`.

    world   seed of a world in which it is seen soon (others follow, should it not be)
    """

    kind: str
    module: str
    old: str
    new: str
    world: int = 0


def load(fault: Fault | None) -> dict[str, ModuleType]:
    """Fresh copies of `MODULES` that know each other, with the fault in one of them."""
    real = {name: sys.modules.get(name) for name in MODULES}
    fresh: dict[str, ModuleType] = {}
    try:
        for name in MODULES:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            source = Path(spec.origin).read_text(encoding="utf-8")
            if fault is not None and fault.module == name:
                found = source.count(fault.old)
                assert found == 1, f"{fault.old!r} occurs {found} times in {name}"
                source = source.replace(fault.old, fault.new)
            module = fresh[name] = ModuleType(name)
            module.__file__ = spec.origin
            sys.modules[name] = module
            exec(compile(source, f"<{name} with a fault>", "exec"), module.__dict__)
    finally:
        for name, original in real.items():
            if original is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = original
    return fresh
