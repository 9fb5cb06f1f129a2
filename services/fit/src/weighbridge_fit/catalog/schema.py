"""The published JSON Schema of manifests, made from the classes that read them.

`python -m weighbridge_fit.catalog.schema > catalog/schema/model.schema.json` writes it again.
"""

import json
from typing import Any

from weighbridge_fit.catalog.format import Manifest

DRAFT = "https://json-schema.org/draft/2020-12/schema"
ID = "urn:weighbridge:schema:model:1"


def json_schema() -> dict[str, Any]:
    """The schema as an object."""
    made = _without_titles(Manifest.model_json_schema(by_alias=True))
    return {"$schema": DRAFT, "$id": ID, "title": "A model of the weighbridge catalogue", **made}


def text() -> str:
    """The schema as its file holds it."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _without_titles(node: Any) -> Any:
    """The titles are the fields' names in other words."""
    if isinstance(node, dict):
        return {key: _without_titles(value) for key, value in node.items() if key != "title"}
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    return node


if __name__ == "__main__":
    print(text(), end="")
