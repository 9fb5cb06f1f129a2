"""From wherever a history has led: if from now on every holder does what it is asked, nobody waits for ever."""

from weighbridge_ledger.book import Ask, Claim, DeviceWant, External, LeaseState, Observed

from services.ledger.tests.explore.machine import TICK_S, Driver, Held

BOUND_S = 300.0
"""Six waiters at most, one after the other: each has the highest level after 30 s, and then waits for its victims,
whose busy spells (4 s), loads (2 s) and minimum residencies (6 s, as loads are short here) end, and which leave within
a tick; and for pins, which are given up after 20 s."""

PINNED_FOR_S = 20.0


def everybody_is_served(driver: Driver) -> None:
    """Holders keep their models until they are asked, use them in turns, and leave when asked; newcomers with a high
    priority keep asking. Everybody who waits at the beginning is granted within the bound."""
    book, scene = driver.book, driver.shadow.scene
    driver.do(lambda: book.set_external(External(), driver.now), then=lambda _: driver.shadow.measured(External()))
    driver.do(lambda: book.set_holds({}, driver.now), then=lambda _: driver.shadow.held({}))
    driver.world.ceilings = driver.ceilings[0]
    driver.do(lambda: book.set_ceilings(driver.ceilings[0], driver.now))
    waiting = dict(scene.waiting)
    began, ticks = driver.world.time, 0
    while scene.waiting.keys() & waiting.keys():
        elapsed = driver.world.time - began
        assert elapsed < BOUND_S, f"starved: {[scene.waiting[one] for one in scene.waiting.keys() & waiting.keys()]}"
        for number, held in enumerate(list(driver.held)):
            _behave(driver, held, busy=(ticks // 2 + number) % 3 > 0, unpin=elapsed >= PINNED_FOR_S)
        _newcomer(driver, ticks)
        driver.pass_time(TICK_S, renewing=True)
        ticks += 1


def _behave(driver: Driver, held: Held, *, busy: bool, unpin: bool) -> None:
    view = driver.book.view(held.lease_id)
    if view is None or not view.lease.state.charged:
        return
    if driver.process(held) in driver.world.dead or view.lease.foreign:
        driver.world.dead |= set(view.lease.processes)
        driver.do(lambda: driver.book.release_by_operator(held.lease_id, lambda _: False, driver.now))
    elif view.lease.state is LeaseState.GRANTED:
        if held.secrets:
            driver.activate_and_load(held)
    elif view.lease.suspect:
        driver.attach(held)
    elif driver.shadow.scene.overruns.get(held.lease_id):
        driver.renew(held, Observed())  # it comes back beneath its grant, or ends its engine
    elif view.lease.state is LeaseState.VACATING or (view.lease.pinned and unpin):
        driver.world.dead |= set(view.lease.engines)
        driver.release(held)
    elif busy and not held.uses:
        driver.begin_use(held)
    elif not busy:
        while held.uses:
            driver.end_use(held)


def _newcomer(driver: Driver, ticks: int) -> None:
    cards = sorted(driver.book.ceilings.devices)
    wants = (DeviceWant(cards[ticks % len(cards)], 1),) if cards and ticks % 2 else ()
    holder = driver.world.process(next(driver.pids))
    driver.admit(Ask("", holder, Claim(0 if wants else 1, wants), priority=3))
