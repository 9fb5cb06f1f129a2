"""Manifests read strictly: what is wrong with one is said with the field, and nothing of it is used."""

import re
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import pydantic

from weighbridge_fit.bounded_json import loads_object
from weighbridge_fit.catalog.entry import MAIN_COMPONENTS, CatalogEntry, CatalogFile, CountRange, PixelRange, Use
from weighbridge_fit.catalog.format import ID_PATTERN, Chat, Manifest, Span
from weighbridge_fit.errors import WeightError, shown
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.pinned import PinnedFactsError, unpin
from weighbridge_fit.plans.plan import Engine

# A manifest is a few KiB. Pinned facts list every tensor: 200 bytes for each of the 91,991 of the largest published
# model make 18 MiB, and a dozen JSON values for each.
MAX_MANIFEST_BYTES = 32 << 20
MAX_VALUES = 2_000_000

_ID = re.compile(ID_PATTERN)
_SPLIT = re.compile(r"-[0-9]{5}-of-[0-9]{5}\.gguf$")
_WORD = re.compile(r"[A-Za-z0-9_$]{1,64}")
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
    _check_roles(manifest, file)
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


def _check_roles(manifest: Manifest, file: str) -> None:
    """Where an engine opens files by their roles, one file has each."""
    if not any(item.component for item in manifest.files):
        raise ManifestError(file, "files", "names no weights: every component is empty")
    if manifest.engine == "generic":
        return
    if not any(item.component in MAIN_COMPONENTS for item in manifest.files):
        raise ManifestError(
            file, "files", f"names no model: a component has to be {' or '.join(sorted(MAIN_COMPONENTS))}"
        )
    if manifest.engine == "mlx":
        return
    roles: set[str] = set()
    for number, item in enumerate(manifest.files):
        part_of_split = item.component in MAIN_COMPONENTS and _SPLIT.search(item.path)
        if item.component in roles and not part_of_split:
            raise ManifestError(file, f"files.{number}.component", f"is there twice: {item.component}")
        if item.component:
            roles.add(item.component)


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
