"""The format of manifests: one JSON file per model.

The JSON Schema that is published beside the catalogue is made from these classes (`catalog.schema`), so that an editor
and fit never disagree about a manifest.
"""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, ConfigDict, Field

MAX_FILES = 4096

ID_PATTERN = r"^[a-z0-9]([a-z0-9.-]{0,62}[a-z0-9])?$"
"""Also the name of the model's folder: nothing that any file system could read as more than a name."""

# Names that every file system takes, none hidden, at most six deep.
_NAME = r"""[^\x00-\x1f\\/:*?"<>|. ][^\x00-\x1f\\/:*?"<>|]*"""
_PATH_PATTERN = f"^{_NAME}(/{_NAME}){{0,5}}$"
# An SPDX licence expression: identifiers, LicenseRef- for licences that SPDX does not list.
_LICENSE_PATTERN = r"^[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*$"


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
