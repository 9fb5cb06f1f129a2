"""Generate the Python stubs before the wheel (or the editable install) is assembled."""

import pathlib
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateProtos(BuildHookInterface):  # type: ignore[type-arg] # its configuration type is hatchling's own
    """hatchling calls initialize() before it collects the files of a build."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Run generate.py, which lives beside this file and is not importable otherwise."""
        sys.path.insert(0, self.root)
        from generate import generate

        generate(pathlib.Path(self.root))
