"""Puts the fit service together."""

import grpc
import weighbridge_catalog
from weighbridge_common.server import ServerContext
from weighbridge_common.settings import SettingsError
from weighbridge_proto.channel import open_channel
from weighbridge_proto.fit.v1 import fit_service_pb2_grpc

from weighbridge_fit.asking import ModelDesk
from weighbridge_fit.catalog.shelf import Shelf
from weighbridge_fit.catalog.store import Catalogue
from weighbridge_fit.families.registry import families
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
        SettingsError: the ledger's socket path is too long, or models would be pulled where none can be opened.
    """
    settings = context.settings
    assert isinstance(settings, FitSettings)
    try:
        target = settings.ledger_address()
    except ValueError as error:
        raise SettingsError(f"{FitSettings.variable('run_dir')}: {error}") from error
    try:
        folder = settings.pulled_models()
    except ValueError as error:
        raise SettingsError(f"{FitSettings.variable('pull_folder')}: {error}") from error
    channel = open_channel(target)
    root = ModelsRoot(settings.models_root.expanduser())
    reader = HeaderReader(root, settings.max_concurrent_reads)
    catalogue = Catalogue(weighbridge_catalog.MODELS, settings.own_manifests())
    shelf = Shelf(catalogue, reader, root, folder)
    ledger = LedgerClient(channel, settings.ledger_timeout_s)
    servicer = FitServicer(ModelDesk(reader, shelf), shelf, ledger, families(settings.assumed_sd_backend()))
    context.add(fit_service_pb2_grpc.add_FitServiceServicer_to_server, servicer)
    return FitService(channel)
