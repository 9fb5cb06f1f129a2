"""Readings as a recorded file, and back.

A recorded file is JSON: `{"format": "weighbridge.machine-readings/1", "platform": "linux", ...}` with the fields of
`Readings` and of what it is made of; absent fields were not read. `python -m weighbridge_ledger.machine.record` prints
one.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from weighbridge_ledger.machine.readings import (
    CgroupLevel,
    CrashReport,
    DeviceReading,
    DrmReading,
    Readings,
    TemperatureReading,
)

FORMAT = "weighbridge.machine-readings/1"

T = TypeVar("T")


class ReadingsError(ValueError):
    """A recorded file that is not one; the message says where and what to do."""


# -- to a file ---------------------------------------------------------------------------------------------------------


def to_json(readings: Readings) -> str:
    """The readings as a recorded file."""
    return json.dumps({"format": FORMAT, **_said(readings)}, indent=1, ensure_ascii=False) + "\n"


def _said(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that say anything."""
    document: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        # An empty list of processes is a statement (none hold anything); the other empty things say nothing.
        if value is None or (value in ("", (), {}) and field.name != "processes"):
            continue
        document[field.name] = _plain(value)
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return dict(value)
    return _said(value) if hasattr(value, "__dataclass_fields__") else value


# -- from a file -------------------------------------------------------------------------------------------------------


def from_json(text: str) -> Readings:
    """Read a recorded file.

    Raises:
        ReadingsError: not JSON, another format, a field that nobody knows or of the wrong type.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReadingsError(f"not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ReadingsError(f'not recorded readings: "format" must be "{FORMAT}"')
    entry = _Entry({name: value for name, value in document.items() if name != "format"}, "", Readings)
    return Readings(
        platform=entry.required_text("platform"),
        meminfo=entry.text("meminfo"),
        cgroups=entry.each("cgroups", _cgroup),
        vm_stat=entry.text("vm_stat"),
        sysctl=entry.texts("sysctl"),
        ram_bytes=entry.integer("ram_bytes"),
        ram_available_bytes=entry.integer("ram_available_bytes"),
        devices=entry.each("devices", _device),
        unified=entry.flag("unified"),
        processor=entry.text("processor") or "",
        failures=tuple(str(failure) for failure in entry.values("failures")),
        drm=entry.each("drm", _drm),
        board=entry.text("board") or "",
        crash_reports=entry.each("crash_reports", _crash_report),
    )


def _cgroup(value: object, where: str) -> CgroupLevel:
    entry = _Entry(value, where, CgroupLevel)
    version = entry.integer("version")
    if version not in (1, 2):
        raise ReadingsError(f"{where}.version must be 1 or 2")
    return CgroupLevel(version, entry.required_text("path"), entry.texts("files"))


def _device(value: object, where: str) -> DeviceReading:
    entry = _Entry(value, where, DeviceReading)
    return DeviceReading(
        device_id=entry.required_text("device_id"),
        name=entry.required_text("name"),
        total_bytes=entry.integer("total_bytes"),
        free_bytes=entry.integer("free_bytes"),
        used_bytes=entry.integer("used_bytes"),
        integrated=entry.flag("integrated"),
        allocation_limit_bytes=entry.integer("allocation_limit_bytes"),
        processes=entry.each("processes", _process) if entry.says("processes") else None,
        temperatures=entry.each("temperatures", _temperature),
        slowdown_reasons=entry.integer("slowdown_reasons"),
        pci=entry.text("pci") or "",
    )


def _process(value: object, where: str) -> tuple[int, int | None]:
    if not isinstance(value, list) or len(value) != 2 or not _is_integer(value[0]):
        raise ReadingsError(f"{where} must be [pid, bytes or null]")
    if value[1] is not None and not _is_integer(value[1]):
        raise ReadingsError(f"{where} must be [pid, bytes or null]")
    return value[0], value[1]


def _temperature(value: object, where: str) -> TemperatureReading:
    entry = _Entry(value, where, TemperatureReading)
    celsius = entry.number("celsius")
    if celsius is None:
        raise ReadingsError(f"{where}.celsius is missing")
    return TemperatureReading(entry.required_text("sensor"), celsius, entry.number("slowdown_celsius"))


def _drm(value: object, where: str) -> DrmReading:
    entry = _Entry(value, where, DrmReading)
    return DrmReading(
        name=entry.required_text("name"),
        driver=entry.text("driver") or "",
        pci=entry.text("pci") or "",
        product=entry.text("product") or "",
        usable=entry.flag("usable"),
        files=entry.texts("files"),
    )


def _crash_report(value: object, where: str) -> CrashReport:
    entry = _Entry(value, where, CrashReport)
    modified_at = entry.number("modified_at")
    if modified_at is None:
        raise ReadingsError(f"{where}.modified_at is missing")
    return CrashReport(entry.required_text("name"), modified_at, entry.text("head") or "")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Entry:
    """One object of the file, whose fields are asked for by type. Every error names where it is."""

    def __init__(self, value: object, where: str, kind: type) -> None:
        """Raises ReadingsError for what is no object, and for a field that `kind` does not have."""
        if not isinstance(value, dict):
            raise ReadingsError(f"{where} must be an object")
        self._document: dict[str, Any] = value
        self._where = where
        known = sorted(field.name for field in fields(kind))
        for name in value:
            if name not in known:
                raise ReadingsError(f"{self._at(name)} is no field of recorded readings; known: {', '.join(known)}")

    def _at(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def says(self, name: str) -> bool:
        return self._document.get(name) is not None

    def text(self, name: str) -> str | None:
        value = self._document.get(name)
        if value is not None and not isinstance(value, str):
            raise ReadingsError(f"{self._at(name)} must be text")
        return value

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise ReadingsError(f"{self._at(name)} is missing")
        return value

    def texts(self, name: str) -> dict[str, str]:
        value = self._document.get(name, {})
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise ReadingsError(f"{self._at(name)} must be an object of texts")
        return dict(value)

    def integer(self, name: str) -> int | None:
        value = self._document.get(name)
        if value is not None and not _is_integer(value):
            raise ReadingsError(f"{self._at(name)} must be an integer")
        return value

    def number(self, name: str) -> float | None:
        value = self._document.get(name)
        # Python's JSON reads NaN and Infinity, which no sensor says.
        if value is not None and not (_is_integer(value) or (isinstance(value, float) and math.isfinite(value))):
            raise ReadingsError(f"{self._at(name)} must be a number")
        return value

    def flag(self, name: str) -> bool | None:
        value = self._document.get(name)
        if value is not None and not isinstance(value, bool):
            raise ReadingsError(f"{self._at(name)} must be true or false")
        return value

    def values(self, name: str) -> list[Any]:
        value = self._document.get(name, [])
        if not isinstance(value, list):
            raise ReadingsError(f"{self._at(name)} must be a list")
        return value

    def each(self, name: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
        return tuple(read(value, f"{self._at(name)}[{index}]") for index, value in enumerate(self.values(name)))
