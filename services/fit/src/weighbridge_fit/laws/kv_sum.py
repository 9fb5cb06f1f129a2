"""Bytes of caches by kind."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """`growing` with the context, `windowed` up to a window, `latent` compressed rows with their indexer's keys, and
    `state` of constant size."""

    growing: int = 0
    windowed: int = 0
    latent: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.growing + self.windowed + self.latent + self.state

    def __add__(self, other: "CacheBytes") -> "CacheBytes":
        return CacheBytes(
            self.growing + other.growing,
            self.windowed + other.windowed,
            self.latent + other.latent,
            self.state + other.state,
        )

    def times(self, count: int) -> "CacheBytes":
        """As many of them."""
        return CacheBytes(self.growing * count, self.windowed * count, self.latent * count, self.state * count)
