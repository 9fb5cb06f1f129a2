"""What an operator has in hand, against a real ledger: watching it over its restarts, and its tools while it runs."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from weighbridge import Suite
from weighbridge.cli.top import look, picture
from weighbridge.following import Interruption, follow
from weighbridge_common import processes
from weighbridge_ledger.book import Event, EventKind
from weighbridge_ledger.service.watch import RING_EVENTS
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB = 2**30
PATIENCE_S = 30


async def admitted(stub, gib: int = 20) -> tuple[str, str]:
    """A lease that this process holds."""
    me = processes.current().to_message()
    call = stub.Admit(pb.AdmitRequest(holder={"name": "h", "process": me}, claim={"host_bytes": gib * GIB}))
    granted = (await call.read()).granted
    await stub.ActivateLease(
        pb.ActivateLeaseRequest(lease_id=granted.lease.lease_id, secret=granted.secret, process=me)
    )
    return granted.lease.lease_id, granted.secret


async def test_a_watch_goes_on_over_a_killed_ledger_and_says_what_it_missed(ledger_process) -> None:
    stub = await ledger_process.start()
    lease_id, secret = await admitted(stub)
    async with Suite(ledger_process.environ) as suite, asyncio.timeout(PATIENCE_S):
        changes = follow(suite)
        first = await anext(changes)
        assert [lease.lease_id for lease in first.snapshot.leases] == [lease_id]
        await stub.SetLimit(pb.SetLimitRequest(limit_bytes=30 * GIB))
        limited = await anext(changes)
        assert (limited.revision, limited.capacity.total.limit_bytes) == (first.revision + 1, 30 * GIB)
        waiting = asyncio.ensure_future(anext(changes))
        await ledger_process.restart_by(signal.SIGKILL)
        told = [await waiting]
        while isinstance(told[-1], Interruption):
            told.append(await anext(changes))
        assert [one.reason for one in told[:-1]] == ["LEDGER_AWAY", "LEDGER_RESTARTED"]
        again = told[-1]
        assert again.epoch != first.epoch
        assert [lease.lease_id for lease in again.snapshot.leases] == [lease_id]
        # What it was told last is enough to go on from, in another process too.
        await changes.aclose()
        resumed = follow(suite, again.epoch, again.revision)
        await stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id=lease_id, secret=secret))
        released = await anext(resumed)
        assert (released.revision, released.lease.state) == (again.revision + 1, lease_pb2.LEASE_STATE_RELEASED)
        await resumed.aclose()
    assert await ledger_process.end(signal.SIGTERM) == 0


async def test_who_reads_too_slowly_begins_anew_by_itself(ledger, tmp_path: Path) -> None:
    lease_id, _ = await ledger.active(10)
    hub = ledger.servicer._watch
    async with Suite(services={"ledger": f"unix:{tmp_path}/ledger.sock"}) as suite, asyncio.timeout(PATIENCE_S):
        changes = follow(suite)
        told: list[object] = [await anext(changes)]
        while not isinstance(told[-1], Interruption):
            hub.on_events([Event(EventKind.CEILINGS_CHANGED, 0.0)] * RING_EVENTS)
            told.append(await anext(changes))
        assert told[-1].reason == "WATCHER_TOO_SLOW"
        again = await anext(changes)
        assert [lease.lease_id for lease in again.snapshot.leases] == [lease_id]
        assert again.revision == hub.revision
        await changes.aclose()


async def test_top_shows_what_the_ledger_holds_and_why_others_wait(ledger, tmp_path: Path) -> None:
    await ledger.active(20)
    call = ledger.admit(10, 2)
    assert (await call.read()).HasField("queued")
    async with Suite(services={"ledger": f"unix:{tmp_path}/ledger.sock"}) as suite:
        frame = picture(await look(suite))
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(frame)
    text = captured.get()
    # A host share of 24 GiB: 20 of it are 82 of 98 cells (81.7).
    assert f"[{'A' * 82}{'.' * 16}]" in text
    assert "1. holder-2: waits for 10.00 GiB" in text
    said = " ".join(text.split())
    assert (
        "6.00 GiB of memory must be given back first: other models hold 20.00 GiB of 24.00 GiB there. Held by A."
        in said
    )
    call.cancel()


async def test_the_tools_work_beside_a_running_ledger_which_goes_on(ledger_process, tmp_path: Path) -> None:
    stub = await ledger_process.start()
    lease_id, secret = await admitted(stub)
    copy = tmp_path / "copy.db"

    def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "weighbridge", "ledger", *arguments, "--json"],
            env=ledger_process.environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    for arguments, key, value in (
        (("backup", str(copy)), "leases", 1),
        (("check",), "sound", True),
        (("check", str(copy)), "sound", True),
        (("replay", str(copy)), "committed_bytes", {"before": 20 * GIB, "after": 20 * GIB}),
    ):
        done = await asyncio.to_thread(tool, *arguments)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[key] == value
    await stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id=lease_id, secret=secret))
    assert await ledger_process.end(signal.SIGTERM) == 0
    # The copy is put in the place of the database: the ledger starts on it and holds what it held then.
    data = tmp_path / "data"
    (data / "ledger.db").unlink()
    copy.rename(data / "ledger.db")
    stub = await ledger_process.start()
    leases = (await stub.ListLeases(pb.ListLeasesRequest())).leases
    assert [lease.lease_id for lease in leases] == [lease_id]
    assert await ledger_process.end(signal.SIGTERM) == 0
