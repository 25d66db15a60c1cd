"""Settings, read once at start from `COREAD_*` environment variables (and command-line options)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.errors import SettingsError
from engine.types import EngineConfig
from rag.prompt import DEFAULT_INSTRUCTIONS

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*$", re.IGNORECASE)
_UNITS = " kmgt"


def parse_size(value: Any) -> Any:
    """`"512MB"`, `"1.5 GiB"` or a number of bytes as an int; anything else is left to the type check."""
    if isinstance(value, str):
        match = _SIZE.match(value)
        if match is None:
            raise ValueError("write a number of bytes such as 268435456, 256MB or 1.5GiB")
        return int(float(match[1]) * 1024 ** _UNITS.index(match[2].lower() or " "))
    return value


def split_commas(value: Any) -> Any:
    """`"a, b"` as `["a", "b"]`, so that a list fits one environment variable."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


Size = Annotated[int, BeforeValidator(parse_size)]
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


class Settings(BaseSettings):
    """All settings. An empty variable counts as unset, as hosting panels leave them so."""

    model_config = SettingsConfigDict(
        env_prefix="COREAD_", env_ignore_empty=True, extra="ignore", validate_default=False, frozen=True
    )

    host: str = Field(
        default_factory=lambda: "0.0.0.0" if os.environ.get("SPACE_ID") else "127.0.0.1",
        validation_alias=AliasChoices("COREAD_HOST", "GRADIO_SERVER_NAME", "host"),
    )
    port: int = Field(
        7860, ge=0, le=65535, validation_alias=AliasChoices("COREAD_PORT", "GRADIO_SERVER_PORT", "port")
    )
    data_dir: Path | None = Field(
        None, validation_alias=AliasChoices("COREAD_DATA_DIR", "DATA_DIR", "data_dir")
    )
    #: Other names under which a loopback server may be asked without a key (a tunnel, a dev container).
    allowed_hosts: Annotated[list[str], NoDecode, BeforeValidator(split_commas)] = []
    #: "open": everybody who can reach the server may read and ask. "accounts": people sign in.
    access: Literal["auto", "open", "accounts"] = "auto"
    api_keys: Annotated[list[SecretStr], NoDecode, BeforeValidator(split_commas)] = []

    #: "auto": the packaged model where it is installed, else one from the hub that fits the device.
    model: str = "auto"
    embedder: str = "auto"
    #: A cross-encoder that orders what was found anew: "none", a folder or a hub id.
    reranker: str = "none"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: "fp8": the KV pool holds 8-bit floats: more text in the same memory, slightly different answers.
    kv_dtype: Literal["auto", "fp8"] = "auto"
    backend: Literal["auto", "reference", "torch_cpu", "torch", "triton"] = "auto"
    kv_pool_bytes: Annotated[Size | None, Field(ge=1)] = None
    max_context: int | None = Field(None, ge=128)
    max_batch_tokens: int = Field(512, ge=16)
    max_running: int = Field(64, ge=1)
    max_queued: int = Field(256, ge=1)
    #: Replay steps of decodes as CUDA graphs (on a GPU).
    cuda_graphs: bool = True
    threads: int | None = Field(None, ge=1)
    sharing: bool = True
    #: Put the sample documents into an empty library, for everybody to read.
    sample: bool = True
    #: Draft answers from the text at hand and verify several tokens a step; the answers stay the same.
    speculation: bool = False

    instructions: str = Field(DEFAULT_INSTRUCTIONS, min_length=1, max_length=8_000)
    search_results: int = Field(5, ge=1, le=50)
    #: Say that the documents do not say, and show the closest passages, where no answer seems to be in them.
    refuse_unanswerable: bool = True
    #: How many of the passages found go into the prompt: small models answer best from little text.
    prompt_passages: int = Field(1, ge=1, le=20)
    #: How many passages of earlier turns stay beside them.
    kept_passages: int = Field(0, ge=0, le=20)
    #: A passage brings its whole section along where that has at most so many characters.
    section_chars: int = Field(2_500, ge=0)
    answer_tokens: int = Field(192, ge=1)
    temperature: float = Field(0.0, ge=0.0, le=5.0)
    repetition_penalty: float = Field(1.0, ge=0.1, le=10.0)
    #: Answering again must be able to say something else.
    regenerate_temperature: float = Field(0.7, ge=0.0, le=5.0)

    max_question_chars: int = Field(16_000, ge=1)
    max_upload_bytes: Size = Field(20 * 2**20, ge=1)
    max_documents_per_person: int = Field(100, ge=1)
    max_running_per_person: int = Field(16, ge=1)
    max_queued_per_person: int = Field(32, ge=1)
    #: Share of the KV pool that blocks read by one person alone may take.
    pool_share_per_person: float = Field(1.0, gt=0.0, le=1.0)
    #: Tokens computed for one person a minute, what comes from shared memory not counted; 0 is no limit.
    max_tokens_per_minute: int = Field(200_000, ge=0)
    max_uploads_per_hour: int = Field(120, ge=0)
    max_storage_per_person: Size = Field(500 * 2**20, ge=1)
    max_storage: Size = Field(20 * 2**30, ge=1)
    conversation_idle_s: float = Field(15 * 60, gt=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    @property
    def max_body_bytes(self) -> int:
        """Limit of one HTTP body: a few files at once, and base64 of one."""
        return 3 * self.max_upload_bytes + 2**20

    @property
    def loopback(self) -> bool:
        """True where only this machine can reach the server."""
        return self.host in LOOPBACK_HOSTS

    @property
    def open_to_all(self) -> bool:
        """True where nobody needs to sign in: chosen so, or nobody but this machine or a Space's visitors
        can reach the server."""
        if self.access == "auto":
            return self.loopback or bool(os.environ.get("SPACE_ID"))
        return self.access == "open"

    def engine_config(self) -> EngineConfig:
        """The engine's part of the settings."""
        return EngineConfig(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            backend=self.backend,
            kv_pool_bytes=self.kv_pool_bytes,
            max_context=self.max_context,
            max_batch_tokens=self.max_batch_tokens,
            max_running=self.max_running,
            max_queued=self.max_queued,
            max_running_per_principal=self.max_running_per_person,
            max_queued_per_principal=self.max_queued_per_person,
            pool_share_per_principal=self.pool_share_per_person,
            cuda_graphs=self.cuda_graphs,
            threads=self.threads,
            sharing=self.sharing,
            speculation=self.speculation,
        )


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment; `overrides` that are not None win.

    Raises `SettingsError` with one sentence that names the variable and what it may be.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        variable = name if name.isupper() else f"COREAD_{name.upper()}"
        shown = "" if "key" in name.lower() else f" is {str(first.get('input'))[:80]!r}"
        raise SettingsError(f"{variable}{shown}: {first['msg'].removeprefix('Value error, ')}.") from None
