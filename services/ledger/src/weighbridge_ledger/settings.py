"""Settings of the ledger."""

from pathlib import Path
from typing import Literal

import pydantic_settings
from pydantic import Field
from weighbridge_common.settings import ServiceSettings

from weighbridge_ledger.book.policy import Policy
from weighbridge_ledger.health.policy import Mode
from weighbridge_ledger.machine.ceilings import Sharing

_DEFAULT = Policy()


class LedgerSettings(ServiceSettings):
    """What the ledger can be told, as ``WEIGHBRIDGE_LEDGER_*`` variables."""

    model_config = pydantic_settings.SettingsConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, env_prefix="WEIGHBRIDGE_LEDGER_"
    )

    data_dir: Path = Field(
        default=Path("~/.weighbridge/ledger"), description="Folder of the database. One ledger owns it."
    )
    machine: str = Field(
        default="",
        description=(
            "The machine, instead of detecting it: unified:64, discrete:64+24+24, cpu:32 (sizes in GiB), or a file of "
            "recorded readings."
        ),
    )
    node_id: str = Field(default="", max_length=128, description="Name of this machine. Empty: its own id.")
    term_s: float = Field(
        default=_DEFAULT.term_s,
        ge=_DEFAULT.min_term_s,
        le=_DEFAULT.max_term_s,
        description="Seconds of silence after which a lease is suspect, unless its holder asks for a term of its own.",
    )
    activate_by_s: float = Field(
        default=_DEFAULT.activate_by_s, ge=1, le=120, description="Seconds within which a grant must be activated."
    )
    queue_bound: int = Field(
        default=_DEFAULT.queue_bound, ge=1, le=100_000, description="Claims that may wait at once."
    )
    max_wait_s: float = Field(
        default=_DEFAULT.max_wait_s, ge=1, le=86_400, description="Seconds that a claim without a deadline waits."
    )

    device_health: Literal["off", "observe"] = Field(
        default="observe",
        description=(
            "What devices mean that are too warm or slow themselves down. off: they are not looked at. observe: the "
            "capacity's notes and the log say it."
        ),
    )

    device_sharing: Literal["auto", "coexist", "swap"] = Field(
        default="auto",
        description=(
            "Whether engines share a device. swap: who claims one for itself has it for itself, and idle others "
            "make room. coexist: such claims count as any other. auto: coexist on Apple silicon with 24 GiB or more, "
            "else swap."
        ),
    )

    def sharing(self) -> Sharing:
        """What becomes of claims for exclusive use."""
        return Sharing(self.device_sharing)

    def health_mode(self) -> Mode:
        """What unhealthy devices mean."""
        return Mode(self.device_health)

    def policy(self) -> Policy:
        """The numbers of the rules under these settings."""
        return Policy(
            term_s=self.term_s,
            activate_by_s=self.activate_by_s,
            queue_bound=self.queue_bound,
            max_wait_s=self.max_wait_s,
        )
