"""Settings of a service: typed fields, read from ``WEIGHBRIDGE_<SERVICE>_*`` variables, refused by name when wrong."""

import difflib
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

import pydantic
import pydantic_settings
from pydantic import Field
from pydantic.fields import FieldInfo

USAGE_EXIT_CODE = 2
"""Exit code of a process that was started with wrong settings."""


class SettingsError(Exception):
    """Settings that a service cannot start with. The text names each variable and says what is wrong with it."""


class ServiceSettings(pydantic_settings.BaseSettings):
    """What every service can be told. A service's own class adds fields and its ``env_prefix``.

    Constructing one reads no environment (tests stay hermetic); :func:`load` does.
    """

    model_config = pydantic_settings.SettingsConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    listen: str = Field(
        default="",
        description="Where to listen: unix:/path/to.sock or host:port. Empty: the service's socket in the run folder.",
    )
    allow_insecure_remote: bool = Field(
        default=False,
        description=(
            "Listen beyond loopback without TLS and a token. For container networks only, where nothing outside the "
            "network can reach the port: everyone who reaches it can use the machine's memory."
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged.")
    grace_s: float = Field(
        default=5.0, ge=0, le=600, description="Seconds that calls in flight have to end when the service stops."
    )
    max_concurrent_calls: int = Field(
        default=512, ge=8, le=65536, description="Calls and streams served at once; more are refused."
    )
    otlp_endpoint: str = Field(
        default="",
        validation_alias="WEIGHBRIDGE_OTLP_ENDPOINT",
        description="OTLP/gRPC collector for traces and metrics, such as http://127.0.0.1:4317. Empty: no telemetry.",
    )
    run_dir: str = Field(
        default="",
        validation_alias="WEIGHBRIDGE_RUN_DIR",
        description="Folder of the suite's sockets. Empty: $XDG_RUNTIME_DIR/weighbridge, else ~/.weighbridge/run.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[pydantic_settings.BaseSettings],
        init_settings: pydantic_settings.PydanticBaseSettingsSource,
        env_settings: pydantic_settings.PydanticBaseSettingsSource,
        dotenv_settings: pydantic_settings.PydanticBaseSettingsSource,
        file_secret_settings: pydantic_settings.PydanticBaseSettingsSource,
    ) -> tuple[pydantic_settings.PydanticBaseSettingsSource, ...]:
        """Arguments only: the environment is read in one place, :func:`parse`, which can name what is wrong."""
        return (init_settings,)

    @classmethod
    def variable(cls, field: str) -> str:
        """The environment variable of ``field``."""
        alias = cls.model_fields[field].validation_alias
        return alias if isinstance(alias, str) else f"{cls.model_config.get('env_prefix', '')}{field}".upper()


S = TypeVar("S", bound=ServiceSettings)


class _Environment(pydantic_settings.EnvSettingsSource):
    """pydantic-settings' reading of variables, from a mapping that is passed in."""

    def __init__(self, settings_cls: type[ServiceSettings], environ: Mapping[str, str]) -> None:
        super().__init__(settings_cls)
        self.env_vars = {name.lower(): value for name, value in environ.items()}

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        """As inherited; a value that must be JSON and is not is told by its variable."""
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except ValueError as error:
            variable = cast(type[ServiceSettings], self.settings_cls).variable(field_name)
            raise SettingsError(f'{variable}: must be JSON, such as ["a", "b"] ({error}).') from error


def parse(cls: type[S], environ: Mapping[str, str]) -> S:
    """Read the settings ``cls`` from ``environ``.

    Raises:
        SettingsError: a value is wrong, or a variable with this service's prefix is no setting (a misspelt one would
            otherwise be ignored in silence).
    """
    _refuse_unknown(cls, environ)
    try:
        values: dict[str, Any] = _Environment(cls, environ)()
        return cls(**values)
    except pydantic.ValidationError as error:
        lines = [f"{_variable_at(cls, problem['loc'])}: {problem['msg']}" for problem in error.errors()]
        raise SettingsError("\n".join(lines)) from error


def load(cls: type[S], environ: Mapping[str, str] | None = None) -> S:
    """:func:`parse`, for a process's main: a wrong setting is told on stderr and ends the process with code 2."""
    try:
        return parse(cls, os.environ if environ is None else environ)
    except SettingsError as error:
        print(f"Wrong settings.\n{error}", file=sys.stderr)
        raise SystemExit(USAGE_EXIT_CODE) from None


def _variable_at(cls: type[ServiceSettings], location: tuple[int | str, ...]) -> str:
    head = str(location[0]) if location else ""
    return cls.variable(head) if head in cls.model_fields else head or str(cls.model_config.get("env_prefix"))


def _refuse_unknown(cls: type[ServiceSettings], environ: Mapping[str, str]) -> None:
    prefix = str(cls.model_config.get("env_prefix", "")).upper()
    known = [cls.variable(field) for field in cls.model_fields]
    for name in environ:
        # Targets say where a client finds the service (weighbridge_proto.targets), and share its prefix.
        if prefix and name.startswith(prefix) and name not in known and not name.endswith("_TARGET"):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Settings here: {', '.join(sorted(known))}."
            raise SettingsError(f"{name}: there is no such setting.{hint}")
