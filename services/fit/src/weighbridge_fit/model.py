"""One model as a plan sees it: its facts, its companions' facts, and where they lie."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.facts import WeightFacts

MAIN = ""
"""The role of the model's own file or folder."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a plan is made for.

    `companions` are further files by role (vae, clip_l, drafter, vision, adapter:NAME, ...), `paths` what an engine
    would open, by role, resolved under the models root (MAIN for the model itself; empty for inline facts and for what
    is not on disk), `entry` the catalogue's entry where it was named by one.
    """

    facts: WeightFacts
    companions: Mapping[str, WeightFacts] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    entry: CatalogEntry | None = None

    @property
    def path(self) -> str:
        """The model's own file or folder, "" where there is none."""
        return self.paths.get(MAIN, "")
