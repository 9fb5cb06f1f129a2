"""Puts the fit service together."""

import grpc
from weighbridge_common.server import ServerContext
from weighbridge_common.settings import SettingsError
from weighbridge_proto.channel import open_channel
from weighbridge_proto.fit.v1 import fit_service_pb2_grpc

from weighbridge_fit.asking import ModelDesk
from weighbridge_fit.ledger_client import LedgerClient
from weighbridge_fit.models_root import ModelsRoot
from weighbridge_fit.reading import HeaderReader
from weighbridge_fit.servicer import FitServicer
from weighbridge_fit.settings import FitSettings


class FitService:
    """What a running fit holds: one channel to the ledger."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def aclose(self) -> None:
        """Closes the channel."""
        await self._channel.close()


async def build(context: ServerContext) -> FitService:
    """The fit of a service process (see weighbridge_common.server). The ledger need not be there yet.

    Raises:
        SettingsError: the ledger's socket path is too long.
    """
    settings = context.settings
    assert isinstance(settings, FitSettings)
    try:
        target = settings.ledger_address()
    except ValueError as error:
        raise SettingsError(f"{FitSettings.variable('run_dir')}: {error}") from error
    channel = open_channel(target)
    reader = HeaderReader(ModelsRoot(settings.models_root.expanduser()), settings.max_concurrent_reads)
    servicer = FitServicer(ModelDesk(reader), LedgerClient(channel, settings.ledger_timeout_s))
    context.add(fit_service_pb2_grpc.add_FitServiceServicer_to_server, servicer)
    return FitService(channel)
