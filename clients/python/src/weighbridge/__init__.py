"""weighbridge: will this model run on this machine, how, and may it load now?

:class:`Suite` is the way in for asyncio programs, :class:`SyncSuite` for all others. Both speak to the services of one
machine; neither needs them installed.
"""

from weighbridge_proto.errors import RpcFailure

from weighbridge.client import Engine, Suite
from weighbridge.failures import CallError
from weighbridge.machines import parse_machine
from weighbridge.sync import SyncSuite
from weighbridge.version import __version__

__all__ = ["CallError", "Engine", "RpcFailure", "Suite", "SyncSuite", "__version__", "parse_machine"]
