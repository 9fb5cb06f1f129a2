"""Which release this is."""

from importlib import metadata

DISTRIBUTIONS = (
    "weighbridge",
    "weighbridge-proto",
    "weighbridge-common",
    "weighbridge-fit",
    "weighbridge-ledger",
    "weighbridge-engines",
)
"""Every distribution of the suite."""


def installed_version(distribution: str) -> str | None:
    """The installed version of ``distribution``; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


__version__ = installed_version("weighbridge") or "0+unknown"
