"""Puts a ledger together: machine, store, book, servicer."""

import random
import sqlite3

import structlog
from weighbridge_common import processes
from weighbridge_common.listening import StartError
from weighbridge_common.server import ServerContext
from weighbridge_common.settings import SettingsError
from weighbridge_proto.ledger.v1 import ledger_service_pb2_grpc

from weighbridge_ledger.book import Book, Home, Policy
from weighbridge_ledger.health.policy import HealthPolicy, Mode
from weighbridge_ledger.machine.ceilings import Sharing
from weighbridge_ledger.machine.declared import MachineSpecError
from weighbridge_ledger.machine.probe import open_probe
from weighbridge_ledger.service.clock import Clock, system_clock
from weighbridge_ledger.service.keeper import Keeper
from weighbridge_ledger.service.machine_desk import MachineDesk, Probe, Wishes
from weighbridge_ledger.service.servicer import LedgerServicer
from weighbridge_ledger.service.sweep import IsAlive, sweep
from weighbridge_ledger.service.tokens import Tokens
from weighbridge_ledger.settings import LedgerSettings
from weighbridge_ledger.store import SqliteStore, Store, StoreError, StoreRefusedError
from weighbridge_ledger.store.sqlite import DATABASE
from weighbridge_ledger.store.unusable import unusable

_log = structlog.get_logger(__name__)


async def build_ledger(context: ServerContext) -> LedgerServicer:
    """The ledger of a service process (see weighbridge_common.server).

    Raises:
        SettingsError: the declared machine is none, or settings contradict each other.
        StartError: the store cannot be opened; it was not touched then.
    """
    settings = context.settings
    assert isinstance(settings, LedgerSettings)
    health = settings.health_policy()
    try:
        probe = await open_probe(
            settings.machine,
            node_id=settings.node_id,
            sensors=health.mode is not Mode.OFF,
            panics=health.panic_rest_s > 0,
        )
    except MachineSpecError as error:
        raise SettingsError(f"{LedgerSettings.variable('machine')}: {error}") from error
    except Exception as error:
        raise StartError(f"This machine's memory cannot be read: {error}") from error
    path = settings.data_dir.expanduser() / DATABASE
    try:
        store = SqliteStore(path)
    except StoreRefusedError as error:
        raise StartError(str(error)) from error
    try:
        servicer = await assemble(
            probe,
            store,
            settings.policy(),
            health=health,
            sharing=settings.sharing(),
            one_load=settings.one_load(),
        )
    except BaseException as error:
        store.close()
        if isinstance(error, StoreRefusedError):
            raise StartError(str(error)) from error
        if isinstance(error, StoreError):
            cause = error.__cause__
            refusal = unusable(path, cause) if isinstance(cause, sqlite3.Error) else error
            raise StartError(str(refusal)) from error
        raise
    context.add(ledger_service_pb2_grpc.add_LedgerServiceServicer_to_server, servicer)
    servicer.start(context.stopping, context.set_serving)
    return servicer


async def assemble(
    probe: Probe,
    store: Store,
    policy: Policy,
    *,
    clock: Clock = system_clock,
    is_alive: IsAlive = processes.is_alive,
    home: Home | None = None,
    health: HealthPolicy | None = None,
    sharing: Sharing = Sharing.AUTO,
    one_load: bool | None = None,
) -> LedgerServicer:
    """A ledger with everything that was committed taken up, the dead swept and the machine measured, not yet started
    (rule 14).

    Raises:
        StoreRefusedError: the store cannot be read.
        StoreError: the store cannot be written.
    """
    # Read first: a store that cannot be understood is left as it is.
    snapshot = store.load()
    epoch = store.begin_epoch()
    last_observation = store.last_observation()
    machine = MachineDesk(probe, Wishes(snapshot.limit_bytes, snapshot.allow_spill), health, sharing, one_load)
    here = processes.current()
    book = Book(
        machine.ceilings(),
        policy,
        home or Home(here.boot_id, here.pid_namespace),
        new_id=Tokens(),
        new_secret=Tokens(),
        spread=random.random,  # spreads deadlines, protects nothing
        now=clock(),
    )
    keeper = Keeper(book, store, clock)
    keeper.run(lambda book, now: book.restore(snapshot, now))
    keeper.take_as_told()
    servicer = LedgerServicer(keeper, machine, epoch, last_observation, is_alive)
    await sweep(keeper, is_alive)
    # Before anybody asks: the first grant must know of other programs, of a hot device and of a panic too.
    await machine.try_to_measure(keeper)
    _log.info(
        "ledger_ready",
        epoch=epoch,
        leases=book.lease_count,
        committed_bytes=book.committed().total_bytes,
        ceiling_bytes=book.ceilings.total_bytes,
    )
    return servicer
