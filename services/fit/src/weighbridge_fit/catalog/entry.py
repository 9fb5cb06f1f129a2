"""One entry of the catalogue. Plain values; reading manifests is `catalog.manifest`'s work."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.plans.plan import Engine

MAIN_COMPONENTS = frozenset({"model", "diffusion_model"})
"""What the file that an engine is started on holds; every other component is a companion, by its role."""


class Use(Enum):
    """What a model is for."""

    IMAGE = "image"
    VIDEO = "video"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class PixelRange:
    """Sides that a model renders well, in pixels, and the one it renders unasked (0: not said)."""

    smallest: int
    largest: int
    usual: int = 0


@dataclass(frozen=True, slots=True)
class CountRange:
    """Numbers of frames, or of frames per second, that a model renders well, and the one unasked (0: not said)."""

    smallest: int
    largest: int
    usual: int = 0


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
    `other_bytes` are files of the repository that are no weights and are not listed one by one (configuration,
    tokenizer). `figures` are sizes that an entry's author gives for a plan (resident_bytes, expert_cache_bytes, ...),
    by name. `ssd_streaming` is None where the entry does not say. `facts` are pinned for the whole folder.
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
    other_bytes: int = 0
    width: PixelRange | None = None
    height: PixelRange | None = None
    default_side_px: int = 0
    recommended_steps: int = 0
    guidance: float = 0.0
    image_to_image: bool | None = None
    frames: CountRange | None = None
    frames_per_second: CountRange | None = None
    pipeline: str = ""
    commercial_use: bool | None = None
    max_context_tokens: int = 0
    ssd_streaming: bool | None = None
    figures: Mapping[str, int] = field(default_factory=dict)
    facts: WeightFacts | None = None
    user_entry: bool = False
    notes: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Size of the files that hold weights."""
        return sum(file.size_bytes for file in self.files if file.component)

    @property
    def file_bytes(self) -> int:
        """Size of all files: what a pull brings."""
        return sum(file.size_bytes for file in self.files) + self.other_bytes

    def main_files(self) -> tuple[CatalogFile, ...]:
        """The files that are the model itself, in order: for a tree of components all of them."""
        mains = tuple(file for file in self.files if file.component in MAIN_COMPONENTS)
        return mains or tuple(file for file in self.files if file.component)

    @property
    def loads_from_folder(self) -> bool:
        """Whether an engine opens the entry's folder, and not one file of it."""
        return self.engine in (Engine.MLX, Engine.GENERIC) and not all(
            file.path.endswith(".gguf") for file in self.main_files()
        )

    def companions(self) -> Mapping[str, CatalogFile]:
        """Files that load beside the model, by role; none where the whole folder is one model."""
        if self.loads_from_folder:
            return {}
        return {file.component: file for file in self.files if file.component not in (MAIN_COMPONENTS | {""})}
