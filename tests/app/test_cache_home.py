"""A HOME that cannot be written. A path below a file stands for it: that fails for root, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cache_home import ensure_cache_home


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"")
    return tmp_path / "file" / "home"


def test_a_home_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    assert ensure_cache_home(environment) is None
    assert environment == {"HOME": str(tmp_path)}


def test_what_the_person_set_is_left_alone(blocked: Path) -> None:
    environment = {"HOME": str(blocked), "XDG_CACHE_HOME": str(blocked / "mine")}
    assert ensure_cache_home(dict(environment)) is None


@pytest.mark.parametrize("variable", ["DATA_DIR", "COREAD_DATA_DIR"])
def test_caches_go_to_the_data_directory(blocked: Path, tmp_path: Path, variable: str) -> None:
    environment = {"HOME": str(blocked), variable: str(tmp_path / "data")}
    assert ensure_cache_home(environment) == tmp_path / "data" / "cache"
    assert environment["XDG_CACHE_HOME"] == str(tmp_path / "data" / "cache")
    assert environment["TRITON_CACHE_DIR"].startswith(environment["XDG_CACHE_HOME"])
    assert "HF_HOME" not in environment


@pytest.mark.parametrize("data", [False, True])
def test_or_to_a_temporary_folder(blocked: Path, tmp_path: Path, data: bool) -> None:
    environment = {"TMPDIR": str(tmp_path), "DATA_DIR": str(blocked / "data") if data else ""}
    chosen = ensure_cache_home(environment)
    assert chosen is not None
    assert chosen.parent == tmp_path


def test_preloaded_models_are_read_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / ".cache" / "huggingface" / "hub" / "models--x").mkdir(parents=True)
    usable = ensure_cache_home.__globals__["_usable"]
    monkeypatch.setattr("app.cache_home._usable", lambda path: home not in path.parents and usable(path))
    environment = {"HOME": str(home), "DATA_DIR": str(tmp_path / "data")}
    assert ensure_cache_home(environment) == tmp_path / "data" / "cache"
    assert environment["HF_HOME"] == str(home / ".cache" / "huggingface")
