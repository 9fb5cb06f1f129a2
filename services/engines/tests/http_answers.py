"""What an engine's own server answered over HTTP, for the tests that question the real one and its stand-in."""

import json
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any, Self


@dataclass(frozen=True)
class HttpAnswer:
    """One answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def of(cls, response: HTTPResponse) -> Self:
        """Read it."""
        return cls(response.status, dict(response.getheaders()), response.read())

    @property
    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.body)
