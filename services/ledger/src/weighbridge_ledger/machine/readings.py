"""Raw readings of one machine as plain data, so that they can be recorded in a file and replayed.

A recorded file is JSON: `{"format": "weighbridge.machine-readings/1", "platform": "linux", ...}` with the fields of
`Readings` and `DeviceReading`; absent fields were not read. `python -m weighbridge_ledger.machine.record` prints one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = "weighbridge.machine-readings/1"


class ReadingsError(ValueError):
    """A recorded file that is not one; the message says where and what to do."""


@dataclass(frozen=True, slots=True)
class CgroupLevel:
    """The memory files of one directory of a cgroup hierarchy, by file name, as text."""

    version: int
    path: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """What a driver says about one device. None: not said, or not supported."""

    device_id: str
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    integrated: bool | None = None
    allocation_limit_bytes: int | None = None
    processes: tuple[tuple[int, int | None], ...] | None = None
    """(pid in the driver's own pid namespace, bytes) pairs."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Everything the probes read off one machine, uninterpreted.

    `unified` is an explicit statement that overrides what names and sizes suggest. `ram_bytes` and
    `ram_available_bytes` are the portable figures, used where the platform's own texts are absent.
    """

    platform: str
    meminfo: str | None = None
    cgroups: tuple[CgroupLevel, ...] = ()
    vm_stat: str | None = None
    sysctl: Mapping[str, str] = field(default_factory=dict)
    ram_bytes: int | None = None
    ram_available_bytes: int | None = None
    devices: tuple[DeviceReading, ...] = ()
    unified: bool | None = None
    processor: str = ""
    """arm64, x86_64, ... as the kernel names it, aliases resolved; "" in recordings that do not say."""
    failures: tuple[str, ...] = ()
    """Probes that failed or ran out of time, a sentence each."""


def to_json(readings: Readings) -> str:
    """The readings as a recorded file."""
    document: dict[str, Any] = {"format": FORMAT, "platform": readings.platform}
    if readings.processor:
        document["processor"] = readings.processor
    for name in ("meminfo", "vm_stat", "ram_bytes", "ram_available_bytes", "unified"):
        value = getattr(readings, name)
        if value is not None:
            document[name] = value
    if readings.sysctl:
        document["sysctl"] = dict(readings.sysctl)
    if readings.cgroups:
        document["cgroups"] = [
            {"version": level.version, "path": level.path, "files": dict(level.files)} for level in readings.cgroups
        ]
    if readings.devices:
        document["devices"] = [_device_to_json(device) for device in readings.devices]
    if readings.failures:
        document["failures"] = list(readings.failures)
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _device_to_json(device: DeviceReading) -> dict[str, Any]:
    document: dict[str, Any] = {"device_id": device.device_id, "name": device.name}
    for name in ("total_bytes", "free_bytes", "used_bytes", "integrated", "allocation_limit_bytes"):
        value = getattr(device, name)
        if value is not None:
            document[name] = value
    if device.processes is not None:
        document["processes"] = [list(pair) for pair in device.processes]
    return document


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
    known = {
        "format", "platform", "meminfo", "cgroups", "vm_stat", "sysctl", "ram_bytes", "ram_available_bytes",
        "devices", "unified", "failures", "processor",
    }  # fmt: skip
    _refuse_unknown(document, known, "")
    return Readings(
        platform=_required_text(document, "platform", ""),
        meminfo=_text(document, "meminfo", ""),
        cgroups=tuple(
            _cgroup_from_json(entry, f"cgroups[{index}]") for index, entry in enumerate(_list(document, "cgroups", ""))
        ),
        vm_stat=_text(document, "vm_stat", ""),
        sysctl=_texts(document, "sysctl", ""),
        ram_bytes=_integer(document, "ram_bytes", ""),
        ram_available_bytes=_integer(document, "ram_available_bytes", ""),
        devices=tuple(
            _device_from_json(entry, f"devices[{index}]") for index, entry in enumerate(_list(document, "devices", ""))
        ),
        unified=_flag(document, "unified", ""),
        processor=_text(document, "processor", "") or "",
        failures=tuple(str(entry) for entry in _list(document, "failures", "")),
    )


def _cgroup_from_json(entry: object, where: str) -> CgroupLevel:
    document = _object(entry, where)
    _refuse_unknown(document, {"version", "path", "files"}, where)
    version = _integer(document, "version", where)
    if version not in (1, 2):
        raise ReadingsError(f"{where}.version must be 1 or 2")
    return CgroupLevel(version, _required_text(document, "path", where), _texts(document, "files", where))


def _device_from_json(entry: object, where: str) -> DeviceReading:
    document = _object(entry, where)
    known = {
        "device_id", "name", "total_bytes", "free_bytes", "used_bytes", "integrated", "allocation_limit_bytes",
        "processes",
    }  # fmt: skip
    _refuse_unknown(document, known, where)
    processes: tuple[tuple[int, int | None], ...] | None = None
    if document.get("processes") is not None:
        processes = tuple(
            _process_from_json(pair, f"{where}.processes[{index}]")
            for index, pair in enumerate(_list(document, "processes", where))
        )
    return DeviceReading(
        device_id=_required_text(document, "device_id", where),
        name=_required_text(document, "name", where),
        total_bytes=_integer(document, "total_bytes", where),
        free_bytes=_integer(document, "free_bytes", where),
        used_bytes=_integer(document, "used_bytes", where),
        integrated=_flag(document, "integrated", where),
        allocation_limit_bytes=_integer(document, "allocation_limit_bytes", where),
        processes=processes,
    )


def _process_from_json(pair: object, where: str) -> tuple[int, int | None]:
    if not isinstance(pair, list) or len(pair) != 2 or not _is_integer(pair[0]):
        raise ReadingsError(f"{where} must be [pid, bytes or null]")
    if pair[1] is not None and not _is_integer(pair[1]):
        raise ReadingsError(f"{where} must be [pid, bytes or null]")
    return pair[0], pair[1]


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ReadingsError(f"{where} must be an object")
    return value


def _refuse_unknown(document: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in document:
        if name not in known:
            raise ReadingsError(
                f"{_at(where, name)} is no field of recorded readings; known: {', '.join(sorted(known))}"
            )


def _text(document: Mapping[str, Any], name: str, where: str) -> str | None:
    value = document.get(name)
    if value is not None and not isinstance(value, str):
        raise ReadingsError(f"{_at(where, name)} must be text")
    return value


def _required_text(document: Mapping[str, Any], name: str, where: str) -> str:
    value = _text(document, name, where)
    if not value:
        raise ReadingsError(f"{_at(where, name)} is missing")
    return value


def _texts(document: Mapping[str, Any], name: str, where: str) -> dict[str, str]:
    value = document.get(name, {})
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ReadingsError(f"{_at(where, name)} must be an object of texts")
    return dict(value)


def _integer(document: Mapping[str, Any], name: str, where: str) -> int | None:
    value = document.get(name)
    if value is not None and not _is_integer(value):
        raise ReadingsError(f"{_at(where, name)} must be an integer")
    return value


def _flag(document: Mapping[str, Any], name: str, where: str) -> bool | None:
    value = document.get(name)
    if value is not None and not isinstance(value, bool):
        raise ReadingsError(f"{_at(where, name)} must be true or false")
    return value


def _list(document: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = document.get(name, [])
    if not isinstance(value, list):
        raise ReadingsError(f"{_at(where, name)} must be a list")
    return value
