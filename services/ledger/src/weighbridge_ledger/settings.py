"""Settings of the ledger."""

from pathlib import Path
from typing import Literal

import pydantic_settings
from pydantic import Field
from weighbridge_common.settings import ServiceSettings, SettingsError

from weighbridge_ledger.book.policy import Policy
from weighbridge_ledger.health.policy import LONGEST_REST_S, HealthPolicy, Mode
from weighbridge_ledger.machine.ceilings import Sharing

_DEFAULT = Policy()
_DEFAULT_HEALTH = HealthPolicy()


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
    min_residency_s: float = Field(
        default=_DEFAULT.min_residency_s,
        ge=0,
        le=86_400,
        description="A loaded model is not asked to make room for this many seconds, nor for twice its load time.",
    )
    max_residency_s: float = Field(
        default=_DEFAULT.max_residency_s,
        ge=0,
        le=86_400,
        description="After this many seconds it may be asked, however long its load took. Not below the other.",
    )

    device_health: Literal["off", "observe", "guard"] = Field(
        default="observe",
        description=(
            "What devices mean that are too warm or slow themselves down. off: they are not looked at. observe: the "
            "capacity's notes and the log say it; only from 105 °C on nothing is loaded or used there. guard: loads "
            "wait for them, and uses are refused, until they have recovered."
        ),
    )
    device_start_celsius: float = Field(
        default=_DEFAULT_HEALTH.start_celsius,
        ge=30,
        lt=_DEFAULT_HEALTH.cut_off_celsius,
        description="A device is unhealthy above this temperature.",
    )
    device_resume_celsius: float = Field(
        default=_DEFAULT_HEALTH.resume_celsius,
        ge=20,
        lt=_DEFAULT_HEALTH.cut_off_celsius,
        description="One that was unhealthy must be down to this to recover. Not above the other.",
    )
    device_margin_celsius: float = Field(
        default=_DEFAULT_HEALTH.least_margin_celsius,
        ge=0,
        le=50,
        description="A device that is nearer than this to the temperature at which it slows itself down is unhealthy.",
    )
    panic_rest_s: float = Field(
        default=_DEFAULT_HEALTH.panic_rest_s,
        ge=0,
        le=LONGEST_REST_S,
        description=(
            "Seconds for which nothing is loaded after the GPU's driver brought macOS down. 0: reports of panics are "
            "not looked at."
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

    one_load_at_a_time: Literal["auto", "always", "never"] = Field(
        default="auto",
        description=(
            "Whether a load waits until the one before has finished. auto: on a Mac, where two at once can panic the "
            "system; a machine that was declared does not say that it is one."
        ),
    )

    def one_load(self) -> bool | None:
        """Whether loads wait for each other; None: by machine."""
        return None if self.one_load_at_a_time == "auto" else self.one_load_at_a_time == "always"

    def sharing(self) -> Sharing:
        """What becomes of claims for exclusive use."""
        return Sharing(self.device_sharing)

    def health_policy(self) -> HealthPolicy:
        """What devices mean that are not well.

        Raises:
            SettingsError: the temperatures contradict each other.
        """
        if self.device_resume_celsius > self.device_start_celsius:
            resume, start = self.variable("device_resume_celsius"), self.variable("device_start_celsius")
            raise SettingsError(
                f"{resume}: must not be above {start} ({self.device_resume_celsius:g} and "
                f"{self.device_start_celsius:g} °C)."
            )
        return HealthPolicy(
            mode=Mode(self.device_health),
            start_celsius=self.device_start_celsius,
            resume_celsius=self.device_resume_celsius,
            least_margin_celsius=self.device_margin_celsius,
            panic_rest_s=self.panic_rest_s,
        )

    def policy(self) -> Policy:
        """The numbers of the rules under these settings.

        Raises:
            SettingsError: the residencies contradict each other.
        """
        if self.min_residency_s > self.max_residency_s:
            least, most = self.variable("min_residency_s"), self.variable("max_residency_s")
            raise SettingsError(
                f"{least}: must not be above {most} ({self.min_residency_s:g} and {self.max_residency_s:g} s)."
            )
        return Policy(
            term_s=self.term_s,
            activate_by_s=self.activate_by_s,
            queue_bound=self.queue_bound,
            max_wait_s=self.max_wait_s,
            min_residency_s=self.min_residency_s,
            max_residency_s=self.max_residency_s,
        )
