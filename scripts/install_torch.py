"""Install the build of PyTorch that fits this machine into the running interpreter's environment.

On Linux the package index serves a CUDA build of `torch`: some 3 GB that a machine without an NVIDIA
GPU has no use for. So the build is chosen before anything else is installed:

1. `TORCH_SPEC` or `TORCH_INDEX` set: the person has chosen; pip is called with just that.
2. A torch in the range the project needs is there already: nothing to do.
3. An NVIDIA GPU is seen (`nvidia-smi` answers), or this is not Linux: what pip would install.
4. Otherwise pip is asked, without installing, what it would take for the version the project is tested
   with. A build without NVIDIA packages is taken; else the same version comes from PyTorch's CPU index.
5. Where that index cannot be reached, the CUDA build is installed after all, and it says so: it runs on
   a CPU too and only wastes disk.

Standard library only: it runs in an environment that holds nothing but pip.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

#: The version that the tests run with. Any version in the range of pyproject.toml may be chosen instead.
TESTED = "torch==2.13.0"
#: The range of pyproject.toml (a test keeps the two equal).
RANGE = "torch>=2.8,<3"
#: PyTorch's own public index of CPU builds: https://pytorch.org/get-started/locally/
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def in_range(version: str) -> bool:
    """Whether an installed version lies in `RANGE`."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (2, 8) <= (int(found[1]), int(found[2])) < (3, 0)


def installed_version() -> str | None:
    """Version of torch in this environment, or None."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def has_nvidia_gpu() -> bool:
    """Whether `nvidia-smi` is there and lists a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def is_cpu_build(report: Mapping[str, Any]) -> bool:
    """Whether the torch in a pip installation report needs no NVIDIA packages."""
    for item in report.get("install", []):
        metadata = item["metadata"]
        if str(metadata["name"]).lower() == "torch":
            if "+" in str(metadata["version"]):
                return str(metadata["version"]).partition("+")[2] == "cpu"
            needs = " ".join(metadata.get("requires_dist", [])).lower()
            return re.search(r"\b(nvidia|cuda)-", needs) is None
    return False


def ask_pip(spec: str) -> Mapping[str, Any] | None:
    """What pip would install for `spec` from its configuration in force; None where it finds nothing."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    done = subprocess.run(
        [*command, "--quiet", "--report", "-", spec], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return None
    report: Mapping[str, Any] = json.loads(done.stdout)
    return report


def choose(
    *, spec: str, index: str, system: str, installed: str | None, gpu: bool, offered: Mapping[str, Any] | None
) -> tuple[list[str] | None, str]:
    """Arguments for `pip install` (None: install nothing) and the reason in words.

    `offered` is pip's report for `TESTED`; it is looked at only in case 4.
    """
    if spec or index:
        arguments = [spec or TESTED, *(["--index-url", index] if index else [])]
        return arguments, "as TORCH_SPEC and TORCH_INDEX say"
    if installed is not None and in_range(installed):
        return None, f"torch {installed} is installed already"
    if gpu:
        return [RANGE], "an NVIDIA GPU was found: the CUDA build that pip offers"
    if system != "Linux":
        return [RANGE], f"{system} has one build only"
    if offered is not None and is_cpu_build(offered):
        return [TESTED], "no NVIDIA GPU, and pip offers a CPU build"
    return [TESTED, "--index-url", CPU_INDEX], f"no NVIDIA GPU: the CPU build from {CPU_INDEX}"


def pip_install(arguments: Sequence[str]) -> int:
    """Run `pip install` with its output shown; returns its exit status."""
    print("+ pip install", *arguments, flush=True)
    return subprocess.run([sys.executable, "-m", "pip", "install", *arguments], check=False).returncode


def main() -> int:
    """Choose and install. Exit status is pip's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="say what would be installed, install nothing")
    only_say = parser.parse_args().dry_run

    spec, index = os.environ.get("TORCH_SPEC", "").strip(), os.environ.get("TORCH_INDEX", "").strip()
    installed, gpu, system = installed_version(), has_nvidia_gpu(), platform.system()
    undecided = not (spec or index or gpu) and installed is None and system == "Linux"
    arguments, reason = choose(
        spec=spec,
        index=index,
        system=system,
        installed=installed,
        gpu=gpu,
        offered=ask_pip(TESTED) if undecided else None,
    )
    print(f"PyTorch: {reason}.", flush=True)
    if arguments is None or only_say:
        if arguments is not None:
            print("pip install", *arguments)
        return 0
    status = pip_install(arguments)
    if status != 0 and not (spec or index) and CPU_INDEX in arguments:
        print(
            f"PyTorch's CPU index {CPU_INDEX} cannot be used from here. Installing the build that pip offers "
            "instead: it needs some 3 GB more disk and runs on a CPU just as well. "
            "To choose another source: make run TORCH_SPEC=torch TORCH_INDEX=<url>.",
            flush=True,
        )
        status = pip_install([RANGE])
    return status


if __name__ == "__main__":
    sys.exit(main())
