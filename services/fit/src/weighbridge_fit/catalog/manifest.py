"""Manifests: one JSON file per model, strictly read.

The classes below are the format. The JSON Schema that is published beside the catalogue is made from them
(`catalog.schema`), so that an editor and fit never disagree about a manifest.
"""

import re
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import pydantic
from pydantic import AfterValidator, ConfigDict, Field

from weighbridge_fit.bounded_json import loads_object
from weighbridge_fit.catalog.entry import CatalogEntry, CatalogFile, CountRange, PixelRange, Use
from weighbridge_fit.errors import WeightError, shown
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.pinned import PinnedFactsError, unpin
from weighbridge_fit.plans.plan import Engine

FORMAT = "weighbridge.model/1"
# A manifest is a few KiB. Pinned facts list every tensor: 200 bytes for each of the 91,991 of the largest published
# model make 18 MiB, and a dozen JSON values for each.
MAX_MANIFEST_BYTES = 32 << 20
MAX_VALUES = 2_000_000
MAX_FILES = 4096

ID_PATTERN = r"^[a-z0-9]([a-z0-9.-]{0,62}[a-z0-9])?$"
"""Also the name of the model's folder: nothing that any file system could read as more than a name."""
_ID = re.compile(ID_PATTERN)
_WORD = re.compile(r"[A-Za-z0-9_$]{1,64}")
# Names that every file system takes, none hidden, at most six deep.
_NAME = r"""[^\x00-\x1f\\/:*?"<>|. ][^\x00-\x1f\\/:*?"<>|]*"""
_PATH_PATTERN = f"^{_NAME}(/{_NAME}){{0,5}}$"
# An SPDX licence expression: identifiers, LicenseRef- for licences that SPDX does not list.
_LICENSE_PATTERN = r"^[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*$"
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin")


class ManifestError(Exception):
    """A manifest that cannot be used. `file` is its name, `field` where in it ("" for the whole), the message says what
    is wrong there."""

    def __init__(self, file: str, field: str, message: str) -> None:
        super().__init__(message)
        self.file = file
        self.field = field
        self.message = message

    def sentence(self) -> str:
        """Where and what: one sentence for a person."""
        where = f"{self.file}, {self.field}" if self.field else self.file
        return f"{where}: {self.message.rstrip('.')}."


class _Part(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _ordered(span: "Span") -> "Span":
    if not span.min <= span.max or (span.usual and not span.min <= span.usual <= span.max):
        raise ValueError("min, usual and max must be in this order")
    return span


Size = Annotated[int, Field(ge=0, le=1 << 50)]
Count = Annotated[int, Field(ge=0, le=1 << 40)]
Text = Annotated[str, Field(max_length=2000)]
Word = Annotated[str, Field(max_length=200)]


class Span(_Part):
    """A range of whole numbers, and the one used when nobody says."""

    min: Annotated[int, Field(ge=1, le=65536)]
    max: Annotated[int, Field(ge=1, le=65536)]
    usual: Annotated[int, Field(ge=0, le=65536, description="Used when nobody says. 0: not said.")] = 0


OrderedSpan = Annotated[Span, AfterValidator(_ordered)]


class File(_Part):
    """One file of a model."""

    path: Annotated[
        str, Field(pattern=_PATH_PATTERN, max_length=400, description="Where it lies in the model's folder.")
    ]
    component: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9_]*$",
            max_length=64,
            description=(
                "What it loads as: model or diffusion_model for the model itself, else its role (vae, clip_l, clip_g, "
                "t5xxl, llm, drafter, vision, ...) or its folder in a diffusers tree. Empty: no weights."
            ),
        ),
    ]
    size_bytes: Annotated[Size, Field(ge=1, description="Its exact size.")]
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$", description="In hex. Empty: not known.")] = ""
    url: Annotated[
        str,
        Field(
            pattern=r"^(https?://[^\s]+)?$",
            max_length=2000,
            description="Where it is downloaded from. Empty: from the model's repository.",
        ),
    ] = ""
    facts: Annotated[
        dict[str, Any] | None, Field(description="Facts about its tensors, as weighbridge pin writes them.")
    ] = None


class Repository(_Part):
    """A repository on the Hugging Face hub that files without an address of their own come from."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
    revision: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9._-]*$", max_length=128, description="A commit. Empty: the newest.")
    ] = ""


class Render(_Part):
    """What a model of images or video renders well."""

    width_px: OrderedSpan
    height_px: OrderedSpan
    default_side_px: Annotated[
        int, Field(ge=0, le=65536, description="Side of the square picture it was made for. 0: not said.")
    ] = 0
    steps: Annotated[int, Field(ge=0, le=1000, description="Steps recommended. 0: not said.")] = 0
    guidance: Annotated[float, Field(ge=0, le=100, description="Guidance recommended. 0: not said.")] = 0.0
    image_to_image: Annotated[
        bool | None, Field(description="Whether it can start from a picture. Absent: not said.")
    ] = None
    frames: Annotated[OrderedSpan | None, Field(description="Frames of a video. Absent: a model of images.")] = None
    frames_per_second: OrderedSpan | None = None
    pipeline: Annotated[Word, Field(description="Class of the diffusers pipeline, where it has to be named.")] = ""


class Chat(_Part):
    """What a chat model was made for."""

    max_context_tokens: Annotated[Count, Field(description="Longest context. 0: not said.")] = 0
    ssd_streaming: Annotated[
        bool | None, Field(description="Whether its engine can stream its experts from disk. Absent: not said.")
    ] = None


class Manifest(_Part):
    """A model that weighbridge knows before it is on the machine."""

    schema_: Annotated[str, Field(alias="$schema", max_length=500, description="For editors; not read.")] = ""
    format: Literal["weighbridge.model/1"]
    id: Annotated[
        str, Field(pattern=ID_PATTERN, description="The file's name without .json, and the name of its folder.")
    ]
    version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", description="Of this entry.")]
    name: Annotated[str, Field(min_length=1, max_length=200, description="For people.")]
    use: Literal["image", "video", "chat"]
    engine: Annotated[
        Literal["sd", "ds4", "mlx", "generic"], Field(description="What loads it; generic: priced, not run.")
    ]
    license: Annotated[
        str,
        Field(
            pattern=_LICENSE_PATTERN,
            max_length=200,
            description="An SPDX expression; LicenseRef-... for licences that SPDX does not list.",
        ),
    ]
    commercial_use: Annotated[
        bool | None, Field(description="Whether the licence allows commercial use. Absent: not said.")
    ] = None
    architecture: Annotated[Word, Field(description="As the model's own configuration names it.")] = ""
    quantization: Annotated[Word, Field(description="In words, such as Q4_K_S or 4bit.")] = ""
    parameters: Annotated[Word, Field(description="In words, such as 27B.")] = ""
    weights_kind: Annotated[
        Literal["", "checkpoint", "diffusion-model"],
        Field(description="For engine sd: everything in one file, or parts beside the diffusion model."),
    ] = ""
    repository: Repository | None = None
    other_bytes: Annotated[
        Size, Field(description="Files of the repository that are no weights and are not listed: their size together.")
    ] = 0
    render: Annotated[Render | None, Field(description="For images and video.")] = None
    chat: Annotated[Chat | None, Field(description="For chat.")] = None
    figures: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")], Count],
        Field(max_length=64, description="Sizes that the author gives for a plan, in bytes or tokens, by name."),
    ] = {}
    files: Annotated[list[File], Field(min_length=1, max_length=MAX_FILES)]
    facts: Annotated[
        dict[str, Any] | None,
        Field(description="Facts about the tensors of all files together, as weighbridge pin writes them."),
    ] = None
    notes: Annotated[list[Text], Field(max_length=32, description="What should be known, a sentence each.")] = []


def read_manifest(data: bytes, file: str, *, user_entry: bool = False) -> CatalogEntry:
    """The entry that a manifest's bytes describe; `file` is its name, and has to be `<id>.json`.

    Raises ManifestError.
    """
    try:
        manifest = Manifest.model_validate(loads_object(data, max_values=MAX_VALUES))
    except WeightError as error:
        at = f" (at byte {error.offset})" if error.offset is not None else ""
        raise ManifestError(file, "", error.message + at) from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ManifestError(file, _field(first["loc"]), str(first["msg"])) from error
    _check(manifest, file)
    return _entry(manifest, file, user_entry)


def is_id(text: str) -> bool:
    """Whether a text can be a catalogue id."""
    return _ID.fullmatch(text) is not None


def _field(location: tuple[int | str, ...]) -> str:
    """Where in a manifest: a key that is nobody's word stands quoted."""
    parts = (str(part) for part in location if part != "[key]")
    return ".".join(part if _WORD.fullmatch(part) else shown(part) for part in parts)


def _check(manifest: Manifest, file: str) -> None:
    """What the types above cannot say."""
    if file != f"{manifest.id}.json":
        raise ManifestError(file, "id", f"must be the file's name without .json, and is {manifest.id!r}")
    pictures = manifest.use in ("image", "video")
    if pictures and manifest.render is None:
        raise ManifestError(file, "render", f"is needed for use {manifest.use}")
    if not pictures and manifest.render is not None:
        raise ManifestError(file, "render", "is for images and video")
    if (manifest.use == "video") != (manifest.render is not None and manifest.render.frames is not None):
        raise ManifestError(file, "render.frames", "is needed for use video, and for no other")
    if pictures and manifest.chat is not None:
        raise ManifestError(file, "chat", "is for use chat")
    if (manifest.engine == "sd") != bool(manifest.weights_kind):
        raise ManifestError(file, "weights_kind", "is needed for engine sd, and for no other")
    if pictures != (manifest.engine in ("sd", "generic")) and manifest.engine != "generic":
        raise ManifestError(file, "engine", f"does no {manifest.use}")
    if not any(item.component for item in manifest.files):
        raise ManifestError(file, "files", "names no weights: every component is empty")
    seen: dict[str, str] = {}
    for number, item in enumerate(manifest.files):
        where = f"files.{number}"
        # Some file systems do not tell Model.safetensors from model.safetensors.
        if item.path.lower() in seen:
            raise ManifestError(file, f"{where}.path", f"is the same as {seen[item.path.lower()]}")
        seen[item.path.lower()] = where
        if item.component and not item.path.endswith(_WEIGHT_SUFFIXES):
            raise ManifestError(file, f"{where}.path", f"names no weight file ({', '.join(_WEIGHT_SUFFIXES)})")
        if not item.url and manifest.repository is None:
            raise ManifestError(file, f"{where}.url", "is needed where there is no repository")
        if item.url and (named := name_in(item.url)) != item.path.rpartition("/")[2]:
            raise ManifestError(file, f"{where}.path", f"must end with the name in the address, {named!r}")


def name_in(url: str) -> str:
    """The name of the file behind an address: the percent-decoded last segment of its path, "" for none."""
    try:
        return unquote(urlsplit(url).path.rpartition("/")[2], errors="strict")
    except ValueError:
        return ""


T = TypeVar("T", PixelRange, CountRange)


def _range(kind: type[T], span: Span | None) -> T | None:
    return None if span is None else kind(span.min, span.max, span.usual)


def _entry(manifest: Manifest, file: str, user_entry: bool) -> CatalogEntry:
    def pinned(value: dict[str, Any] | None, field: str) -> WeightFacts | None:
        if value is None:
            return None
        try:
            return unpin(value)
        except PinnedFactsError as error:
            raise ManifestError(file, f"{field}.{error.field}", error.message) from error

    render, chat, repository = manifest.render, manifest.chat or Chat(), manifest.repository
    files = tuple(
        CatalogFile(
            path=item.path,
            component=item.component,
            size_bytes=item.size_bytes,
            sha256=item.sha256,
            url=item.url,
            facts=pinned(item.facts, f"files.{number}.facts"),
        )
        for number, item in enumerate(manifest.files)
    )
    return CatalogEntry(
        catalog_id=manifest.id,
        version=manifest.version,
        display_name=manifest.name,
        use=Use(manifest.use),
        engine=Engine(manifest.engine),
        files=files,
        license=manifest.license,
        architecture=manifest.architecture,
        quantization=manifest.quantization,
        parameters=manifest.parameters,
        weights_kind=manifest.weights_kind,
        repository=repository.name if repository else "",
        revision=repository.revision if repository else "",
        other_bytes=manifest.other_bytes,
        width=_range(PixelRange, render.width_px) if render else None,
        height=_range(PixelRange, render.height_px) if render else None,
        default_side_px=render.default_side_px if render else 0,
        recommended_steps=render.steps if render else 0,
        guidance=render.guidance if render else 0.0,
        image_to_image=render.image_to_image if render else None,
        frames=_range(CountRange, render.frames) if render else None,
        frames_per_second=_range(CountRange, render.frames_per_second) if render else None,
        pipeline=render.pipeline if render else "",
        commercial_use=manifest.commercial_use,
        max_context_tokens=chat.max_context_tokens,
        ssd_streaming=chat.ssd_streaming,
        figures=dict(manifest.figures),
        facts=pinned(manifest.facts, "facts"),
        user_entry=user_entry,
        notes=tuple(manifest.notes),
    )
