"""weighbridge: will this model run on this machine, how, and may it load now?

:class:`Suite` is the way in for asyncio programs, :class:`SyncSuite` for all others. Both speak to the services of one
machine; neither needs them installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weighbridge_proto.errors import RpcFailure

    from weighbridge.admitting import admit
    from weighbridge.answers import Answer
    from weighbridge.client import Suite
    from weighbridge.engine_client import Engine
    from weighbridge.failures import CallError
    from weighbridge.following import Interruption, follow
    from weighbridge.machines import parse_machine
    from weighbridge.pictures import Picture, Rendering
    from weighbridge.sync import SyncSuite
    from weighbridge.tools import tools_from_json
    from weighbridge.version import __version__

__all__ = [
    "Answer",
    "CallError",
    "Engine",
    "Interruption",
    "Picture",
    "Rendering",
    "RpcFailure",
    "Suite",
    "SyncSuite",
    "__version__",
    "admit",
    "follow",
    "parse_machine",
    "tools_from_json",
]

_HOMES = {
    "Answer": "weighbridge.answers",
    "CallError": "weighbridge.failures",
    "Engine": "weighbridge.engine_client",
    "Interruption": "weighbridge.following",
    "Picture": "weighbridge.pictures",
    "Rendering": "weighbridge.pictures",
    "RpcFailure": "weighbridge_proto.errors",
    "Suite": "weighbridge.client",
    "SyncSuite": "weighbridge.sync",
    "__version__": "weighbridge.version",
    "admit": "weighbridge.admitting",
    "follow": "weighbridge.following",
    "parse_machine": "weighbridge.machines",
    "tools_from_json": "weighbridge.tools",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used: gRPC takes half a second, in which the command could not yet take care of a Ctrl-C, and
    # which the lifeline of each service (weighbridge.supervision.lifeline) needs none of.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
