"""What holds the repository together: pins in step, a Space's front matter, names that do not collide."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements(lines: list[str]) -> dict[str, Requirement]:
    """Requirements by normalised name; comments and empty lines are left out."""
    parsed = [Requirement(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    by_name = {re.sub(r"[-_.]+", "-", r.name).lower(): r for r in parsed}
    assert len(by_name) == len(parsed), "a package is listed twice"
    return by_name


def runtime() -> dict[str, Requirement]:
    return requirements(PROJECT["project"]["dependencies"])


def front_matter() -> dict[str, Any]:
    found = re.match(r"---\n(.*?)\n---\n", README, re.DOTALL)
    assert found, "README.md begins with a front matter between two --- lines"
    loaded = yaml.safe_load(found[1])
    assert isinstance(loaded, dict)
    return loaded


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tracked_files() -> list[Path]:
    """Files that git tracks; all files of a copy without git (a Space)."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# Pins


def test_a_space_installs_what_the_project_needs() -> None:
    listed = requirements((ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines())
    assert {name: (r.specifier, r.marker) for name, r in listed.items()} == {
        name: (r.specifier, r.marker) for name, r in runtime().items()
    }


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    dev = requirements(PROJECT["project"]["optional-dependencies"]["dev"])
    for requirement in [*runtime().values(), *dev.values()]:
        operators = {s.operator for s in requirement.specifier}
        assert operators in ({">=", "<"}, {"=="}), f"{requirement} needs both bounds"


def test_gradio_of_the_space_is_the_gradio_installed_here() -> None:
    pinned = Version(str(front_matter()["sdk_version"]))
    assert pinned in runtime()["gradio"].specifier
    assert Version(importlib.metadata.version("gradio")) == pinned, (
        "test with the version that a Space will run"
    )


def test_torch_is_installed_in_the_range_of_the_project() -> None:
    script = load_script("install_torch")
    assert Requirement(script.RANGE).specifier == runtime()["torch"].specifier
    (tested,) = Requirement(script.TESTED).specifier
    assert tested.version in runtime()["torch"].specifier
    for version, inside in [
        ("2.7.1", False),
        ("2.8.0", True),
        ("2.13.0+cpu", True),
        ("3.0.0", False),
        ("x", False),
    ]:
        assert script.in_range(version) is inside


# The Space


def test_front_matter_says_how_a_space_starts() -> None:
    matter = front_matter()
    assert matter["sdk"] == "gradio"
    assert matter["app_file"] == "app.py"
    assert matter["python_version"] == "3.12"
    assert matter["startup_duration_timeout"] == "1h"
    assert matter["license"] == "apache-2.0"
    assert {"title", "emoji", "colorFrom", "colorTo", "pinned", "short_description"} <= matter.keys()
    assert len(matter["short_description"]) <= 60
    assert (
        Version(matter["python_version"])
        in Requirement(f"python{PROJECT['project']['requires-python']}").specifier
    )


# Names and texts


def test_import_app_finds_the_package_and_not_the_entry_point() -> None:
    code = "import app, sys; sys.stdout.write(app.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout) == ROOT / "app" / "__init__.py"


@pytest.mark.parametrize(
    "module", ["engine.types", "engine.errors", "engine.service", "kernels.plan", "app.settings"]
)
def test_these_modules_load_without_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_tracked_file_names_a_machine() -> None:
    """Absolute paths of somebody's machine and local package sources do not belong in the repository."""
    homes = r"(?<![\w./-])/(?:home/\w|Users/\w|root/|work/|opt/(?:pypi|wheels))"
    pattern = re.compile(homes)
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path != Path(__file__).resolve():
            found += [f"{path.relative_to(ROOT)}: {m[0]}" for m in pattern.finditer(text)]
    assert found == []


def test_licence_and_notice() -> None:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert "SmolLM2-135M-Instruct" in notice
    assert "all-MiniLM-L6-v2" in notice
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_links_of_the_documents_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        text = page.read_text(encoding="utf-8")
        headings = {
            re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).strip().replace(" ", "-")
            for line in text.splitlines()
            if line.startswith("#")
        }
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("#"):
                if target[1:] not in headings:
                    broken.append(f"{page.name}: {target}")
            elif "://" not in target and not (page.parent / target.partition("#")[0]).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_readme_has_a_row_with_the_default_for_every_setting() -> None:
    from app.settings import Settings, parse_size

    rows = dict(re.findall(r"^\| `COREAD_([A-Z_]+)` \| `?([^|`]*)`?.*\|", README, re.MULTILINE))
    fields = {name.upper(): field for name, field in Settings.model_fields.items()}
    assert rows.keys() == fields.keys()
    for name, field in fields.items():
        default = field.default
        if isinstance(default, bool):
            assert rows[name] == str(default).lower(), name
        elif isinstance(default, int):
            assert parse_size(rows[name]) == default, name
        elif isinstance(default, float):
            assert float(rows[name]) == default, name
        elif isinstance(default, str) and name != "INSTRUCTIONS":
            assert rows[name] == default, name


# The Makefile


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ([], []),  # the settings decide, not names that some shells export
        (["HOST=::1"], ["--host", "::1"]),
        (["PORT=9000", "HOST=127.0.0.1"], ["--host", "127.0.0.1", "--port", "9000"]),
    ],
)
def test_make_run_passes_on_only_what_its_command_line_gives(given: list[str], options: list[str]) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", "run", *given],
        cwd=ROOT,
        env={**os.environ, "HOST": "0.0.0.0", "PORT": "1", "COREAD_PORT": "8123", "MAKEFLAGS": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1].split()[1:] == ["serve", *options]


# The build of torch


def report(version: str, *needs: str) -> dict[str, Any]:
    return {"install": [{"metadata": {"name": "torch", "version": version, "requires_dist": list(needs)}}]}


CUDA_BUILD = report("2.13.0", "filelock", 'nvidia-cublas==13.1; platform_system == "Linux"', "triton==3.7")


def test_pip_report_tells_cpu_builds_from_cuda_builds() -> None:
    script = load_script("install_torch")
    assert script.is_cpu_build(report("2.13.0+cpu", "filelock"))
    assert script.is_cpu_build(report("2.13.0", "filelock", "networkx"))
    assert not script.is_cpu_build(report("2.13.0+cu128", "filelock"))
    assert not script.is_cpu_build(report("2.13.0", "filelock", "cuda-bindings>=13"))
    assert not script.is_cpu_build(CUDA_BUILD)
    assert not script.is_cpu_build({"install": []})


def test_the_build_of_torch_fits_the_machine() -> None:
    script = load_script("install_torch")
    here: dict[str, Any] = {
        "spec": "", "index": "", "system": "Linux", "installed": None, "gpu": False, "offered": CUDA_BUILD,
    }  # fmt: skip

    def arguments(**changed: Any) -> list[str] | None:
        chosen, reason = script.choose(**{**here, **changed})
        assert reason
        result: list[str] | None = chosen
        return result

    cpu_index = ["--index-url", script.CPU_INDEX]
    assert arguments() == [script.TESTED, *cpu_index]
    assert arguments(offered=None) == [script.TESTED, *cpu_index]
    assert arguments(offered=report("2.13.0+cpu")) == [script.TESTED]
    assert arguments(gpu=True) == [script.RANGE]
    assert arguments(system="Darwin") == [script.RANGE]
    assert arguments(installed="2.9.0+cpu", gpu=True) is None
    assert arguments(installed="2.1.0") == [script.TESTED, *cpu_index]
    assert arguments(spec="torch==2.9.1", installed="2.13.0") == ["torch==2.9.1"]
    assert arguments(index="https://example.org/whl") == [
        script.TESTED,
        "--index-url",
        "https://example.org/whl",
    ]
