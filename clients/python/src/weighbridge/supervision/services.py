"""Which processes a suite consists of, and how each is started."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util

from weighbridge.reach import HEALTH_SERVICES

ENGINE_KINDS = ("mlx", "sd", "ds4")
"""Engines that `up` can start."""

ENGINE_MODULES = {"sd": ("httpx2", "PIL"), "ds4": ("httpx2",)}
"""What the service of an engine imports beyond its own distribution; it could not even say that it is missing."""

STOP_GRACE_S = 15.0
"""How long a service may take to stop: 5 s for calls in flight, then the end of its engine, before it is killed."""

STOP_GRACE_OF_ENGINES_S = {"ds4": 45.0}
"""Of engines that need longer: ds4-server writes its conversation to disk, up to 0.5 GB, and has 30 s for that."""


@dataclass(frozen=True)
class ServiceSpec:
    """One process of the suite.

    Attributes:
        name: the name its socket carries.
        argv: how it is started.
        health_services: the gRPC services that say SERVING when it is ready.
        stop_rank: services of the lowest rank are stopped first, those of one rank together.
        stop_grace_s: how long it may take to stop before it is killed.
    """

    name: str
    argv: tuple[str, ...]
    health_services: tuple[str, ...]
    stop_rank: int
    stop_grace_s: float = STOP_GRACE_S


class MissingServiceError(Exception):
    """A service of the suite is not installed. The text says what to install."""


def suite_services(engines: Sequence[str]) -> tuple[ServiceSpec, ...]:
    """The ledger, fit and an engine service of each kind in ``engines``, in the order of their start.

    Raises:
        MissingServiceError: one of them is not installed.
        ValueError: there is no such engine.
    """
    for kind in engines:
        if kind not in ENGINE_KINDS:
            raise ValueError(f"There is no engine {kind!r} to start. The engines are {', '.join(ENGINE_KINDS)}.")
        if not all(map(is_installed, ENGINE_MODULES.get(kind, ()))):
            raise MissingServiceError(
                f"The engine {kind} needs libraries that are not installed: pip install 'weighbridge-engines[{kind}]'."
            )
    services = [_service("ledger", "weighbridge_ledger", (), 2), _service("fit", "weighbridge_fit", (), 1)]
    for kind in dict.fromkeys(engines):
        grace_s = STOP_GRACE_OF_ENGINES_S.get(kind, STOP_GRACE_S)
        services.append(_service(f"engine-{kind}", "weighbridge_engines", (kind,), 0, grace_s))
    return tuple(services)


def is_installed(module: str) -> bool:
    """Whether the top-level ``module`` can be imported. It is not."""
    return util.find_spec(module) is not None


def _service(
    name: str, module: str, arguments: tuple[str, ...], stop_rank: int, stop_grace_s: float = STOP_GRACE_S
) -> ServiceSpec:
    if not is_installed(module):
        raise MissingServiceError(
            f"The service {name} is not installed ({module}). Install the suite: pip install 'weighbridge[suite]'."
        )
    argv = (sys.executable, "-m", "weighbridge.supervision.lifeline", module, *arguments)
    return ServiceSpec(name, argv, HEALTH_SERVICES[name], stop_rank, stop_grace_s)
