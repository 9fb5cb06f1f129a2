"""Which sd-server is here, as one JSON object: ``python -m weighbridge_engines.sd_server``.

For whoever asks while the engine service does not run: `weighbridge doctor` does. Either ``path``, ``version`` and
``backend``, or ``missing``: why there is none and what to do.
"""

import json
import os

from weighbridge_engines.sd_server import binary
from weighbridge_engines.supervisor.program import BinaryMissingError


def main() -> None:
    """Look, and print what is found."""
    try:
        path = binary.PROGRAM.locate(os.environ.get(binary.PROGRAM.variable, ""))
        found = binary.probe(path, binary.PROGRAM.cache_folder())
    except BinaryMissingError as missing:
        print(json.dumps({"missing": str(missing)}))
    else:
        print(json.dumps({"path": str(found.path), "version": found.version, "backend": found.backend}))


if __name__ == "__main__":
    main()
