"""Why a render was refused, in the options of the command: the engine names the fields of the contract."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weighbridge_proto.errors import RpcFailure

OPTION_OF_FIELD = {
    "prompt": "PROMPT",
    "negative_prompt": "--negative",
    "size": "--size",
    "size.width_px": "--size, width",
    "size.height_px": "--size, height",
    "size.batch": "--count",
    "size.quality": "--quality",
    "steps": "--steps",
    "guidance": "--guidance",
    "seed": "--seed",
    "sampler": "--sampler",
    "scheduler": "--scheduler",
    "strength": "--strength",
    "require_source": "--require-source",
    "source_images": "--from",
    "mask": "--mask",
    "reference_images": "--reference",
    "format": "--format",
}
"""What a person gave, by the field of GenerateImageRequest that it went into."""

_PICTURE = re.compile(r"(source_images|mask|reference_images)(?:\[(\d{1,4})\])?\.data")


def in_options(
    failure: RpcFailure, source: Path | None = None, mask: Path | None = None, references: Sequence[Path] = ()
) -> RpcFailure:
    """``failure`` with options and files in its message where it names fields; its reason and its fields stay.

    Args:
        failure: of GenerateImage.
        source: the file of --from.
        mask: the file of --mask.
        references: the files of --reference, as they were sent.
    """
    files = {
        "source_images": [source] if source else [],
        "mask": [mask] if mask else [],
        "reference_images": references,
    }
    message = failure.message
    for field, _ in failure.field_violations:
        given = _given(field, files)
        if given and message.startswith(f"{field}: "):
            message = given + message.removeprefix(field)
    return replace(failure, message=message)


def _given(field: str, files: dict[str, Sequence[Path]]) -> str:
    """The option that a field was given by, with its file where it is one; empty: none."""
    picture = _PICTURE.fullmatch(field)
    if picture is None:
        return OPTION_OF_FIELD.get(field, "")
    option, number = OPTION_OF_FIELD[picture[1]], int(picture[2] or 0)
    paths = files[picture[1]]
    return f"{option} {paths[number]}" if number < len(paths) else option
