"""Where the manifests of the catalogue and their schema lie. Data alone: `weighbridge_fit.catalog` reads it."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
# A wheel carries the folders inside the package; an editable install reads them where they are edited.
_ROOT = _PACKAGE if (_PACKAGE / "models").is_dir() else _PACKAGE.parents[1]

MODELS = _ROOT / "models"
"""One manifest for each model, `<id>.json`."""

SCHEMA = _ROOT / "schema" / "model.schema.json"
"""The JSON Schema of manifests, draft 2020-12."""
