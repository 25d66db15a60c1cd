"""Settings and the data directory: defaults per place, one clear sentence for what cannot work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.data_dir import read_or_create_secret, resolve_data_dir
from app.errors import DataDirUnusable, SettingsError
from app.settings import load_settings

ROOT_WRITES_ANYWHERE = pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only folders")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("COREAD_", "GRADIO_")) or name in ("SPACE_ID", "DATA_DIR"):
            monkeypatch.delenv(name)


def test_defaults_are_loopback_at_home_and_open_on_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().host == "127.0.0.1"
    assert load_settings().loopback
    monkeypatch.setenv("SPACE_ID", "someone/coread")
    assert load_settings().host == "0.0.0.0"
    assert not load_settings().loopback
    monkeypatch.setenv("COREAD_HOST", "127.0.0.1")
    assert load_settings().loopback


def test_gradios_own_variables_are_understood_and_ours_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_SERVER_PORT", "7999")
    assert load_settings().port == 7999
    monkeypatch.setenv("COREAD_PORT", "7001")
    assert load_settings().port == 7001
    assert load_settings(port=7002).port == 7002


@pytest.mark.parametrize(
    ("written", "count"), [("256MB", 2**28), ("1.5 GiB", 3 * 2**29), ("4096", 4096), ("2k", 2048)]
)
def test_sizes_may_be_written_for_people(monkeypatch: pytest.MonkeyPatch, written: str, count: int) -> None:
    monkeypatch.setenv("COREAD_KV_POOL_BYTES", written)
    assert load_settings().engine_config().kv_pool_bytes == count


def test_empty_variables_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREAD_PORT", "")
    monkeypatch.setenv("COREAD_KV_POOL_BYTES", "")
    assert load_settings().port == 7860


@pytest.mark.parametrize(
    ("name", "value"),
    [("PORT", "99999"), ("PORT", "web"), ("DEVICE", "tpu"), ("KV_POOL_BYTES", "lots"), ("TEMPERATURE", "nan"),
     ("KV_POOL_BYTES", "-5"), ("INSTRUCTIONS", "x" * 9_000)],
)  # fmt: skip
def test_a_bad_value_is_one_sentence_with_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"COREAD_{name}", value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    message = str(caught.value)
    assert f"COREAD_{name}" in message
    assert "\n" not in message
    assert len(message) < 400


def test_a_bad_key_list_does_not_print_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREAD_API_KEYS", "secret-one, secret-two,")
    settings = load_settings()
    assert [key.get_secret_value() for key in settings.api_keys] == ["secret-one", "secret-two"]
    assert "secret" not in repr(settings)


def test_a_data_dir_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataDirUnusable, match="COREAD_DATA_DIR"):
        resolve_data_dir(tmp_path / "file" / "data")


@ROOT_WRITES_ANYWHERE
def test_a_read_only_data_dir_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataDirUnusable, match="cannot be written"):
        resolve_data_dir(tmp_path / "data")


@pytest.mark.parametrize("home", ["", "/proc/no-such-home"])
def test_without_a_usable_home_a_temporary_folder_serves_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, home: str
) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    chosen = resolve_data_dir(None)
    assert chosen.parent == tmp_path
    assert chosen.is_dir()
    assert "COREAD_DATA_DIR" in caplog.text
    assert "lost" in caplog.text


def test_secrets_are_stable_private_and_checked(tmp_path: Path) -> None:
    first = read_or_create_secret(tmp_path, "cookie.key")
    assert read_or_create_secret(tmp_path, "cookie.key") == first
    assert len(first) == 32
    assert (tmp_path / "cookie.key").stat().st_mode & 0o077 == 0
    (tmp_path / "cookie.key").write_bytes(b"short")
    with pytest.raises(DataDirUnusable, match="damaged"):
        read_or_create_secret(tmp_path, "cookie.key")
