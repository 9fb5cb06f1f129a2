"""Settings of the fit service: variables ``WEIGHBRIDGE_FIT_*``."""

import os
from pathlib import Path
from typing import Literal

import pydantic_settings
from pydantic import Field
from weighbridge_common.settings import ServiceSettings
from weighbridge_proto import targets


class FitSettings(ServiceSettings):
    """What fit can be told beside what every service can."""

    model_config = pydantic_settings.SettingsConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, env_prefix="WEIGHBRIDGE_FIT_"
    )

    models_root: Path = Field(
        default=Path("~/.weighbridge/models"),
        description="Folder that model paths may reach, links resolved. Nothing outside it is ever opened.",
    )
    pull_folder: str = Field(
        default="",
        description=(
            "Folder under the models root that catalogue models are pulled into and looked for, each in a folder of "
            "its own. Empty: the models root, or ~/.weighbridge/models where that is /."
        ),
    )
    catalog_folder: Path = Field(
        default=Path("~/.weighbridge/catalog"),
        description="Folder of your own manifests, read beside those that come with weighbridge.",
    )
    max_concurrent_reads: int = Field(
        default=4, ge=1, le=64, description="Models whose headers are read at once; further calls wait their turn."
    )
    ledger_timeout_s: float = Field(
        default=5.0, gt=0, le=120, description="Seconds that the ledger has to answer when a plan needs it."
    )
    sd_backend: Literal["auto", "cpu", "cuda", "vulkan", "metal"] = Field(
        default="auto",
        description=(
            "What the sd-server here was built for, where nobody who asks says it; the image engine does, of its own "
            "binary. auto: Metal on Apple silicon, a build for the GPU where there is one, else the processor."
        ),
    )
    ledger_target: str = Field(
        default="",
        validation_alias="WEIGHBRIDGE_LEDGER_TARGET",
        description="gRPC target of the ledger. Empty: its socket in the run folder.",
    )

    def pulled_models(self) -> Path:
        """Where catalogue models are, and are pulled into.

        Raises:
            ValueError: it is not under the models root.
        """
        root = Path(os.path.realpath(self.models_root.expanduser()))
        chosen = self.pull_folder or ("~/.weighbridge/models" if root == Path(root.anchor) else str(root))
        folder = Path(os.path.realpath(_expanded(Path(chosen)) or root))
        if not folder.is_relative_to(root):
            raise ValueError(f"{folder} is not under the models root {root}: nothing there could be opened")
        return folder

    def own_manifests(self) -> Path | None:
        """The folder of the user's manifests; None for a user who has no home."""
        return _expanded(self.catalog_folder)

    def assumed_sd_backend(self) -> str:
        """What sd-server is taken to be built for, "" where the machine decides."""
        return "" if self.sd_backend == "auto" else self.sd_backend

    def ledger_address(self) -> str:
        """The gRPC target of the ledger.

        Raises:
            ValueError: the run folder's path is too long for a socket.
        """
        if self.ledger_target:
            return self.ledger_target
        environ = {**os.environ, "WEIGHBRIDGE_RUN_DIR": self.run_dir} if self.run_dir else dict(os.environ)
        environ.pop(targets.target_variable("ledger"), None)
        return targets.target("ledger", environ)


def _expanded(path: Path) -> Path | None:
    """The path with the user's home in it; None where it needs one and there is none, as for a container's bare uid."""
    try:
        return path.expanduser()
    except RuntimeError:
        return None
