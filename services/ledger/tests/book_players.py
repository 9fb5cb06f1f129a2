"""People of a play around one book: holders that load, use and leave, and the scheduler that is fair to them.

The scheduler of `Stage.pass_time` does what the rules ask of every holder: it keeps all leases renewed, and lets
whoever was asked to vacate leave as soon as nothing of it is in use. All else is up to the play.
"""

import itertools
from collections.abc import Iterator

from weighbridge_ledger.book import Claim, EventKind, LeaseState, Refused
from weighbridge_ledger.book.states import Credential

LONG_TERM_S = 600.0
"""Terms are no matter of these plays."""


class Player:
    """One process that claims memory, one lease at a time."""

    def __init__(self, stage: "Stage", pid: int, size: int, **claim: object) -> None:
        self.stage = stage
        self.pid = pid
        self.size = size
        self.claim = claim
        self.lease_id = ""
        self.use = ""
        self.silent = False
        """It no longer renews."""
        self.stubborn = False
        """It does not leave when it is asked to."""

    def ask(self, **more: object) -> "Player":
        """Ask for what it always asks for."""
        claim: dict[str, object] = {"term_s": LONG_TERM_S, **self.claim, **more}
        self.lease_id = self.stage.world.admit(self.size, self.pid, **claim).lease.lease_id
        self.use = ""
        return self

    @property
    def state(self) -> LeaseState:
        return self.stage.world.state(self.lease_id)

    @property
    def waits(self) -> bool:
        return self.state is LeaseState.QUEUED

    @property
    def asked(self) -> bool:
        """Whether it was asked to vacate, and still has to."""
        return self.state is LeaseState.VACATING

    @property
    def gone(self) -> bool:
        return not self.lease_id or self.state is LeaseState.RELEASED

    @property
    def secret(self) -> str:
        return self.stage.world.secret(self.lease_id)

    @property
    def credential(self) -> Credential:
        return Credential(self.lease_id, self.secret)

    @property
    def device(self) -> str:
        """The card that it is charged on."""
        return self.stage.world.book.view(self.lease_id).lease.charge.devices[0][0]

    def activate(self) -> "Player":
        """Accept the grant."""
        world = self.stage.world
        world.book.activate(self.lease_id, self.secret, world.process(self.pid), (), world.now)
        world.drain()
        return self

    def loaded(self) -> "Player":
        """Tell that the engine has finished loading."""
        world = self.stage.world
        world.book.renew(self.lease_id, self.secret, None, world.now, load_complete=True)
        world.drain()
        return self

    def run(self) -> "Player":
        """Accept the grant, load at once, and be in use from then on. While the claim waits: nothing."""
        return self.activate().loaded().begin() if self.state is LeaseState.GRANTED else self

    def settle(self) -> "Player":
        """Ask, load at once, and be idle past any minimum residency."""
        self.ask().activate().loaded()
        self.stage.pass_time(self.stage.world.policy.min_residency_s)
        return self

    def begin(self) -> "Player":
        world = self.stage.world
        self.use = world.book.begin_use(self.lease_id, self.secret, "", world.now)
        world.drain()
        return self

    def end(self) -> "Player":
        world = self.stage.world
        world.book.end_use(self.lease_id, self.secret, self.use, world.now)
        world.drain()
        self.use = ""
        return self

    def attach(self) -> "Player":
        """Come back after a silence."""
        world = self.stage.world
        world.book.attach(self.lease_id, world.process(self.pid), "", world.now)
        world.drain()
        self.silent = False
        return self

    def leave(self) -> "Player":
        """Give everything back. While the claim waits: nothing."""
        if self.state.charged:
            self.stage.world.release(self.lease_id, self.secret)
            self.use = ""
        return self

    def resize(self, size: int) -> bool:
        """Grow or shrink to `size`, unless that is refused."""
        world = self.stage.world
        try:
            world.book.resize(self.lease_id, self.secret, Claim(size), world.now)
        except Refused:
            return False
        finally:
            world.drain()
        return True

    def try_to_begin(self) -> bool:
        """Begin a use unless that is refused."""
        try:
            self.begin()
        except Refused:
            self.stage.world.drain()
            return False
        return True

    def granted_after(self) -> float | None:
        """How long the claim waited for its grant; None: it was not granted."""
        times = {
            event.kind: event.wall
            for event in self.stage.world.events
            if event.lease is not None and event.lease.lease_id == self.lease_id
        }
        return times[EventKind.GRANTED] - times[EventKind.QUEUED] if EventKind.GRANTED in times else None


class Stage:
    """A world, its players and the time that passes for them."""

    def __init__(self, world) -> None:
        self.world = world
        self.players: list[Player] = []
        self._pids = itertools.count(1)

    def player(self, size: int = 0, *, pid: int | None = None, **claim: object) -> Player:
        """Somebody new, or another lease of the process `pid`, who has not asked yet."""
        player = Player(self, next(self._pids) if pid is None else pid, size, **claim)
        self.players.append(player)
        return player

    def pass_time(self, seconds: float) -> None:
        """Time passes; every holder renews, and those who were asked leave unless they are in use."""
        until = self.world.time + seconds
        while self.world.time < until:
            self.world.pass_time(min(0.5, until - self.world.time))
            self.be_fair()

    def be_fair(self) -> None:
        """Do what the rules ask of every holder."""
        for player in self.players:
            if player.gone or player.state not in (LeaseState.ACTIVE, LeaseState.VACATING):
                continue
            if player.asked and not player.use and not player.stubborn:
                player.leave()
            elif not player.silent:
                self.world.book.renew(player.lease_id, player.secret, None, self.world.now)
                self.world.drain()

    def play(self, others: Iterator[float], waiter: Player, within_s: float) -> float:
        """How long `waiter`, who waits from now on, waits for its grant while the others play; at most `within_s`.

        Args:
            others: what the others do; each item is the seconds that pass until they do the next.
            waiter: has just asked.
            within_s: the bound that the rules promise.
        """
        begin = self.world.time
        for pause in others:
            self.pass_time(pause)
            waited = waiter.granted_after()
            if waited is not None:
                assert waited <= within_s, f"granted after {waited} s"
                return waited
            assert self.world.time - begin <= within_s, f"not granted within {within_s} s"
        raise AssertionError("the others stopped playing")
