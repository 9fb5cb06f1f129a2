"""One call's way to a loaded model: it is loaded, joined, or found; and held for as long as the call uses it."""

from collections.abc import AsyncGenerator

from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb

from weighbridge_engines.host import failures
from weighbridge_engines.host.engine_host import EngineHost
from weighbridge_engines.host.loads import LoadJob
from weighbridge_engines.host.plans import request_key
from weighbridge_engines.host.residency import Residency
from weighbridge_engines.host.wish import Wish


class Visit:
    """One call's stake in a load, and then in the loaded model. :meth:`close` gives it back.

    Args:
        host: the engine.
        wish: what the call wants.
        wants_use: whether it is going to use the model, not only to have it loaded.
        plan: the wish's plan, where it is made already.
        may_load: whether the model is loaded if it is not; else the call is refused.
    """

    def __init__(
        self,
        host: EngineHost,
        wish: Wish,
        wants_use: bool,
        plan: fit_pb.PlanModelResponse | None = None,
        may_load: bool = True,
    ) -> None:
        self._host = host
        self._wish = wish
        self._plan = plan
        self._wants_use = wants_use
        self._may_load = may_load
        self._job: LoadJob | None = None
        self._residency: Residency | None = None

    @property
    def residency(self) -> Residency:
        """What is loaded, once :meth:`events` has ended."""
        assert self._residency is not None
        return self._residency

    def begun(self) -> None:
        """The call uses the model now, by the ledger's leave."""
        self.residency.use.begun(self)

    async def events(self) -> AsyncGenerator[engine_pb.LoadModelResponse, None]:
        """Load, or join a load, or find it loaded; ends when the model can be used.

        Raises:
            RequestError: why it cannot.
        """
        host, wish = self._host, self._wish
        key = None if wish.model is None else request_key(wish.model, wish.workload, wish.options)
        host.refuse_if_stopping()
        if (ready := host.find_ready(wish, key)) is not None:
            self._have(ready)
            return
        job = host.find_job(wish, key) if self._may_load else None
        if job is None:
            if key is None:
                raise failures.no_model_loaded(ending=host.current is not None)
            plan = self._plan or await host.plan(wish)
            same = host.find_same(wish, plan, key)
            if isinstance(same, Residency):
                self._have(same)
                return
            if not self._may_load:
                raise failures.warm_up_loads_nothing()
            job = same or host.start_load(wish, key, plan)
        self._job = job
        job.join(self, self._wants_use)
        async for event in job.follow():
            yield event
        self._have(job.result())

    def close(self) -> None:
        """The call is over."""
        if self._job is not None:
            self._job.leave(self)
        if self._residency is not None:
            self._residency.use.drop(self)
        elif self._job is not None and self._job.done:
            # The load gave the model to this call, which was gone by then.
            current = self._host.current
            if current is not None:
                current.use.drop(self)
        self._host.tell_change()

    def _have(self, residency: Residency) -> None:
        self._residency = residency
        if self._wants_use:
            residency.use.take(self)
        elif self._wish.idle_timeout_s is not None or self._wish.terms.pinned:
            timeout_s = self._wish.idle_timeout_s
            # A pin is taken off by unloading alone: who asks for another timeout does not know who else relies on it.
            residency.use.change_idle_terms(
                self._wish.terms.pinned or residency.use.pinned,
                residency.use.idle_timeout_s if timeout_s is None else timeout_s or None,
            )
        self._host.tell_change()
