"""Settings of an engine service: variables ``WEIGHBRIDGE_ENGINES_*``."""

from typing import Literal

import pydantic_settings
from pydantic import Field
from weighbridge_common.settings import ServiceSettings


class EngineSettings(ServiceSettings):
    """What an engine service can be told beside what every service can."""

    model_config = pydantic_settings.SettingsConfigDict(env_prefix="WEIGHBRIDGE_ENGINES_")

    idle_timeout_s: float = Field(
        default=300.0, ge=0, le=7 * 86400,
        description="Unload a model that nothing has used for this many seconds. 0: never.",
    )  # fmt: skip
    start_timeout_s: float = Field(
        default=600.0, gt=0, le=86400,
        description=(
            "Seconds from the start of the engine's process until its model must be ready. An engine for very large "
            "models takes longer, unless this is set."
        ),
    )  # fmt: skip
    stop_grace_s: float = Field(
        default=3.0, ge=0, le=120,
        description=(
            "Seconds between asking the engine's process to end and killing it. The ds4 engine has 30 to save its "
            "cache, unless this is set."
        ),
    )  # fmt: skip
    queue_limit: int = Field(
        default=64, ge=0, le=4096,
        description="Requests that may wait for the engine beside those it serves; more are refused.",
    )  # fmt: skip
    ledger_patience_s: float = Field(
        default=5.0, ge=0, le=120,
        description="Seconds for which a request waits for a ledger or fit service that does not answer.",
    )  # fmt: skip
    lease_term_s: float = Field(
        default=0.0, ge=0, le=600, description="Term of the engine's lease in seconds. 0: the ledger's default."
    )
    footprint_period_s: float = Field(
        default=1.0, gt=0, le=60, description="Seconds between measurements of the engine's memory."
    )
    sd_server: str = Field(
        default="", max_length=4096,
        description=(
            "The sd-server of stable-diffusion.cpp: the program, or a folder that has it. Empty: the first on PATH, "
            "else ~/.weighbridge/bin/sd-server."
        ),
    )  # fmt: skip
    ds4_server: str = Field(
        default="", max_length=4096,
        description=(
            "The ds4-server of ds4 (DwarfStar): the program, or a folder that has it. Empty: the first on PATH, else "
            "~/.weighbridge/bin/ds4-server."
        ),
    )  # fmt: skip
    ds4_lock_file: str = Field(
        default="", max_length=4096,
        description=(
            "The lock of the ds4 engine, for tests and for a second ds4 that is meant to run beside another. Empty: "
            "the one that all ds4 processes of a machine share, so that one of them runs at a time."
        ),
    )  # fmt: skip
    ds4_idle_limit_s: float = Field(
        default=600.0, ge=1, le=86400,
        description=(
            "Seconds for which the ds4 engine may say nothing in an answer. It is silent while it reads a piece of a "
            "prompt, which takes minutes where experts come from a slow disk."
        ),
    )  # fmt: skip
    ds4_kv_dir: str = Field(
        default="", max_length=4096,
        description=(
            "Where the ds4 engine keeps conversations on disk, with their text: one folder of up to 16 GiB for each "
            "model. Empty: ~/.cache/weighbridge/ds4/kv. Load with disk_kv=false to keep none."
        ),
    )  # fmt: skip
    fence_when_silent: Literal["auto", "on", "off"] = Field(
        default="auto",
        description=(
            "End the engine when its lease was not renewed for a whole term. Needed where the ledger cannot see this "
            "service's processes (another machine or container). auto: as the ledger says with each lease."
        ),
    )
