"""A ledger over a real channel: grants what is asked, when the test lets it, and keeps what it was told."""

# ruff: noqa: N802, ASYNC110 # rpcs are named as in the contract; leases are polled

import asyncio
import uuid
from pathlib import Path

import grpc
from weighbridge_proto.errors import RequestError, RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2, ledger_service_pb2_grpc

S = grpc.StatusCode


def process_exists(pid):
    """Whether ``pid`` runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class FakeLedger(ledger_service_pb2_grpc.LedgerServiceServicer):
    """Grants at once or when told; keeps what it was asked. Leases survive its restart, secrets do not."""

    def __init__(self):
        self.leases = {}
        self.secrets = {}
        self.admits = []
        self.released = []
        self.uses_begun = 0
        self.uses = {}
        self.most_uses = 0
        self.lose_ends = 0
        self.verbs = []
        self.resizes = []
        self.unhealthy_s = None
        self.refuse_admit = None
        self.refuse_resize = None
        self.sees_processes = True
        self.observations = []
        self.observed = []
        self.load_complete = set()
        self.grant = asyncio.Event()
        self.grant.set()
        self.activate_gate = asyncio.Event()
        self.activate_gate.set()
        self.use_gate = asyncio.Event()
        self.use_gate.set()
        self.refuse_growth = False
        self.growths_refused = 0
        self.attached = 0
        self.stopping = False
        self.refuse_use = None
        self.forget_all = False
        self.term_s = 30.0
        self.streams = set()

    @property
    def committed(self):
        return sum(
            lease.charge.host_bytes
            for lease in self.leases.values()
            if lease.state not in (lease_pb2.LEASE_STATE_QUEUED, lease_pb2.LEASE_STATE_RELEASED)
        )

    @property
    def active(self):
        return [lease for lease in self.leases.values() if lease.state == lease_pb2.LEASE_STATE_ACTIVE]

    @property
    def queued(self):
        return [lease for lease in self.leases.values() if lease.state == lease_pb2.LEASE_STATE_QUEUED]

    def restart(self):
        """What a restart does to secrets and streams; the server is restarted by the suite."""
        self.secrets = {lease_id: uuid.uuid4().hex for lease_id in self.leases}
        self.uses.clear()
        for lease in self.leases.values():
            lease.uses = 0
        self.streams.clear()

    def vacate(self, lease_id):
        self.leases[lease_id].state = lease_pb2.LEASE_STATE_VACATING
        reason = RpcFailure(S.ABORTED, "RECLAIMED", "Somebody needs it.").to_message()
        for stream in self.streams:
            stream.put_nowait(
                ledger_service_pb2.KeepAliveResponse(
                    lease_id=lease_id, vacate=ledger_service_pb2.VacateRequested(reason=reason)
                )
            )

    def shrink(self, lease_id, optional_bytes):
        asked = ledger_service_pb2.ShrinkRequested(optional_bytes=optional_bytes)
        for stream in self.streams:
            stream.put_nowait(ledger_service_pb2.KeepAliveResponse(lease_id=lease_id, shrink=asked))

    def _check(self, lease_id, secret):
        lease = self.leases.get(lease_id)
        if lease is None or self.forget_all or lease.state == lease_pb2.LEASE_STATE_RELEASED:
            raise RequestError(S.NOT_FOUND, "LEASE_NOT_FOUND", "No such lease.")
        if self.secrets[lease_id] != secret:
            raise RequestError(S.PERMISSION_DENIED, "LEASE_SECRET_MISMATCH", "Another secret.")
        if lease.suspect:
            raise RequestError(S.FAILED_PRECONDITION, "LEASE_SUSPECT", "Silent for too long.")
        return lease

    async def Admit(self, request, context):
        self.admits.append(request)
        if self.stopping:
            raise RequestError(S.UNAVAILABLE, "LEDGER_STOPPING", "Stopping.")
        if self.refuse_admit is not None:
            raise self.refuse_admit
        if request.HasField("replaces_lease"):
            self._check(request.replaces_lease.lease_id, request.replaces_lease.secret)
        lease = lease_pb2.Lease(
            lease_id=uuid.uuid4().hex, state=lease_pb2.LEASE_STATE_QUEUED, holder=request.holder, node_id="node-1",
            processes_visible=self.sees_processes,
        )  # fmt: skip
        lease.purpose.CopyFrom(request.purpose)
        self.leases[lease.lease_id] = lease
        try:
            if not self.grant.is_set():
                yield ledger_service_pb2.AdmitResponse(
                    queued=ledger_service_pb2.AdmitQueued(lease_id=lease.lease_id, position=1)
                )
                await self.grant.wait()
            if request.HasField("replaces_lease"):
                async for response in self._replace(lease, request.replaces_lease):
                    yield response
            lease.state = lease_pb2.LEASE_STATE_GRANTED
            lease.claim.CopyFrom(request.claim)
            lease.charge.host_bytes = request.claim.host_bytes + request.claim.optional_host_bytes
            lease.charge.optional_bytes = request.claim.optional_host_bytes
            secret = self.secrets[lease.lease_id] = uuid.uuid4().hex
            yield ledger_service_pb2.AdmitResponse(granted=ledger_service_pb2.AdmitGranted(lease=lease, secret=secret))
            while lease.state == lease_pb2.LEASE_STATE_GRANTED:
                await asyncio.sleep(0.005)
        finally:
            if lease.state in (lease_pb2.LEASE_STATE_QUEUED, lease_pb2.LEASE_STATE_GRANTED):
                lease.state = lease_pb2.LEASE_STATE_RELEASED

    async def _replace(self, lease, credential):
        """What else it needs is there: the old lease is asked to vacate, busy or not, and waited for."""
        old = self.leases[credential.lease_id]
        if old.state == lease_pb2.LEASE_STATE_ACTIVE:
            self.vacate(old.lease_id)
            yield ledger_service_pb2.AdmitResponse(
                reclaiming=ledger_service_pb2.AdmitReclaiming(lease_id=lease.lease_id, victim_lease_ids=[old.lease_id])
            )
        while old.state != lease_pb2.LEASE_STATE_RELEASED:
            await asyncio.sleep(0.005)

    async def ActivateLease(self, request, context):
        await self.activate_gate.wait()
        lease = self._check(request.lease_id, request.secret)
        lease.state = lease_pb2.LEASE_STATE_ACTIVE
        lease.engine_processes.extend(request.engine_processes)
        return ledger_service_pb2.ActivateLeaseResponse(lease=lease)

    async def AttachLease(self, request, context):
        lease = self.leases.get(request.lease_id)
        if lease is None or self.forget_all or lease.state == lease_pb2.LEASE_STATE_RELEASED:
            raise RequestError(S.NOT_FOUND, "LEASE_NOT_FOUND", "No such lease.")
        assert request.process == lease.holder.process
        if request.secret and request.secret != self.secrets[request.lease_id]:
            raise RequestError(S.PERMISSION_DENIED, "LEASE_SECRET_MISMATCH", "Another secret.")
        self.attached += 1
        self.verbs.append("attach")
        lease.suspect = False
        secret = self.secrets[request.lease_id] = uuid.uuid4().hex
        return ledger_service_pb2.AttachLeaseResponse(lease=lease, secret=secret)

    async def KeepAlive(self, request_iterator, context):
        outbox = asyncio.Queue()
        self.streams.add(outbox)

        async def read():
            async for request in request_iterator:
                await outbox.put(self._renew(request))
            await outbox.put(None)

        reading = asyncio.create_task(read())
        try:
            while (response := await outbox.get()) is not None:
                yield response
        finally:
            reading.cancel()
            self.streams.discard(outbox)

    def _renew(self, request):
        response = ledger_service_pb2.KeepAliveResponse(lease_id=request.lease_id)
        self.verbs.append("renew")
        try:
            lease = self._check(request.lease_id, request.secret)
            if request.HasField("observed"):
                self.observed.append(request.observed)
                if request.observed.host_bytes > lease.charge.host_bytes:
                    if self.refuse_growth:
                        told = {
                            "observed_bytes": request.observed.host_bytes,
                            "granted_bytes": lease.charge.host_bytes,
                        }
                        self.growths_refused += 1
                        raise RequestError(S.RESOURCE_EXHAUSTED, "OUT_OF_GRANT", "It holds more.", metadata=told)
                    lease.charge.host_bytes = request.observed.host_bytes
        except RequestError as error:
            response.failure.CopyFrom(error.failure.to_message())
            return response
        if request.load_complete:
            self.load_complete.add(request.lease_id)
        response.renewed.term.FromNanoseconds(int(self.term_s * 1e9))
        response.renewed.charge.CopyFrom(lease.charge)
        return response

    async def BeginUse(self, request, context):
        self.verbs.append("begin")
        lease = self._check(request.lease_id, request.secret)
        if lease.state == lease_pb2.LEASE_STATE_VACATING or self.refuse_use == request.lease_id:
            raise RequestError(S.FAILED_PRECONDITION, "LEASE_VACATING", "Asked to vacate.")
        if self.unhealthy_s is not None:
            why = "The device is 84 °C warm and rests."
            raise RequestError(S.UNAVAILABLE, "DEVICE_UNHEALTHY", why, retry_after_s=self.unhealthy_s)
        uses = self.uses.setdefault(request.lease_id, set())
        uses.add(request.use_id)
        lease.uses = len(uses)
        self.most_uses = max(self.most_uses, lease.uses)
        self.uses_begun += 1
        await self.use_gate.wait()
        return ledger_service_pb2.BeginUseResponse(use_id=request.use_id)

    async def EndUse(self, request, context):
        self.verbs.append("end")
        if self.lose_ends:
            self.lose_ends -= 1
            raise RequestError(S.UNAVAILABLE, "LEDGER_STOPPING", "Stopping.")
        lease = self._check(request.lease_id, request.secret)
        uses = self.uses.setdefault(request.lease_id, set())
        uses.discard(request.use_id)
        lease.uses = len(uses)
        return ledger_service_pb2.EndUseResponse(uses=lease.uses)

    async def ResizeLease(self, request, context):
        self.verbs.append("resize")
        lease = self._check(request.lease_id, request.secret)
        if self.refuse_resize is not None:
            raise self.refuse_resize
        self.resizes.append(request.claim)
        lease.claim.CopyFrom(request.claim)
        lease.charge.optional_bytes = min(lease.charge.optional_bytes, request.claim.optional_host_bytes)
        lease.charge.host_bytes = request.claim.host_bytes + lease.charge.optional_bytes
        return ledger_service_pb2.ResizeLeaseResponse(lease=lease)

    async def ReleaseLease(self, request, context):
        lease = self._check(request.lease_id, request.secret)
        living = [p.pid for p in lease.engine_processes if process_exists(p.pid)]
        assert not living, f"released while {living} live"
        lease.state = lease_pb2.LEASE_STATE_RELEASED
        self.released.append(request.reason)
        return ledger_service_pb2.ReleaseLeaseResponse(lease=lease)

    async def RecordObservation(self, request, context):
        self.observations.append(request.observation)
        return ledger_service_pb2.RecordObservationResponse(observation=request.observation)
