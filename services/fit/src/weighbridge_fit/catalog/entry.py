"""One entry of the catalogue. Plain values; reading manifests is `catalog.manifest`'s work."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.plans.plan import Engine


class Use(Enum):
    """What a model is for."""

    IMAGE = "image"
    VIDEO = "video"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class PixelRange:
    """Sides that a model renders well, in pixels."""

    smallest: int
    largest: int


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """One file of an entry. `path` is relative to the entry's folder; `component` the role it loads as ("" for files
    that are no weights); `url` "" where it comes from the entry's repository; `facts` None where none are pinned."""

    path: str
    component: str
    size_bytes: int
    sha256: str = ""
    url: str = ""
    facts: WeightFacts | None = None

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that is known before it is on this machine.

    `weights_kind` is sd-server's: "checkpoint" (everything in one file) or "diffusion-model" (parts beside it).
    `figures` are sizes that an entry's author gives for a plan (resident_bytes, expert_cache_bytes, ...), by name.
    `ssd_streaming` is None where the entry does not say.
    """

    catalog_id: str
    version: str
    display_name: str
    use: Use
    engine: Engine
    files: tuple[CatalogFile, ...]
    license: str
    architecture: str = ""
    quantization: str = ""
    parameters: str = ""
    weights_kind: str = ""
    repository: str = ""
    revision: str = ""
    width: PixelRange | None = None
    height: PixelRange | None = None
    default_side_px: int = 0
    recommended_steps: int = 0
    image_to_image: bool | None = None
    commercial_use: bool | None = None
    max_context_tokens: int = 0
    ssd_streaming: bool | None = None
    figures: Mapping[str, int] = field(default_factory=dict)
    facts: WeightFacts | None = None
    user_entry: bool = False
    notes: tuple[str, ...] = ()

    @property
    def file_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)
