"""Turns a model reference into a path that is certainly under the models root."""

import os
from pathlib import Path

# PATH_MAX of Linux; every part of a longer reference would be looked up on the disk.
MAX_REFERENCE = 4096


class ModelNotFoundError(Exception):
    """There is no such model for the caller: absent, outside the root, or not readable. The cases must look alike."""


class ModelsRoot:
    """The one folder that references may reach. Every path that is opened goes through `resolve` or `contains`."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))

    @property
    def path(self) -> Path:
        """The root itself, links resolved."""
        return self._root

    def resolve(self, reference: str) -> Path:
        """The real path of a reference (absolute, or relative to the root), links resolved.

        Raises ModelNotFoundError. Never says whether something exists outside the root.
        """
        if not reference or len(reference) > MAX_REFERENCE or "\0" in reference:
            raise ModelNotFoundError(reference)
        try:
            # strict: a path that does not exist is refused by the same exception as one that may not be seen.
            path = Path(os.path.realpath(self._root / reference, strict=True))
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(reference) from error
        if not path.is_relative_to(self._root):
            raise ModelNotFoundError(reference)
        return path

    def contains(self, path: Path) -> Path | None:
        """The real path of a file found while walking a model, None when its links lead out of the root."""
        try:
            return self.resolve(str(path))
        except ModelNotFoundError:
            return None
