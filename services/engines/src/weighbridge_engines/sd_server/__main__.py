"""Which sd-server is here, as one JSON object: ``python -m weighbridge_engines.sd_server``.

For whoever asks while the engine service does not run: `weighbridge doctor` does. Either ``path``, ``version`` and
``backend``, or ``missing``: why there is none and what to do.
"""

import json
import os

from weighbridge_engines.sd_server import binary


def main() -> None:
    """Look, and print what is found."""
    try:
        found = binary.probe(binary.locate(os.environ.get("WEIGHBRIDGE_ENGINES_SD_SERVER", "")), binary.cache_folder())
    except binary.BinaryMissingError as missing:
        print(json.dumps({"missing": str(missing)}))
    else:
        print(json.dumps({"path": str(found.path), "version": found.version, "backend": found.backend}))


if __name__ == "__main__":
    main()
