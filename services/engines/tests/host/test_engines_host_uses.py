"""Being busy: by the ledger's leave, from a call's turn on, told again after a restart, held back by a warm device."""

import asyncio

import grpc
import pytest
from host_fakes import ManualClock, Suite, eventually, failure_of, kinds, until_event
from weighbridge_engines.host.clock import Clock
from weighbridge_engines.host.uses import LONGEST_REST_S, LeaseUses

REST_S = 30


class Verbs:
    """A ledger's stub that answers when told; what it carried out stands in `done`."""

    def __init__(self):
        self.done = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def BeginUse(self, request, timeout):  # noqa: N802
        await self.gate.wait()
        self.done.append(("begin", request.use_id))

    async def EndUse(self, request, timeout):  # noqa: N802
        self.done.append(("end", request.use_id))


async def begun(uses, use_id):
    async for _ in uses.begin(use_id):
        raise AssertionError("nothing to wait for")


async def test_a_restarted_ledger_hears_of_open_uses_before_anything_else(run_dir):
    # A busy holder that is taken for idle is asked to vacate in the middle of an answer.
    async with Suite(run_dir) as suite:
        call = suite.chat("endless")
        await until_event(call, "delta")
        [lease] = suite.ledger.active
        suite.ledger.verbs.clear()
        await suite.restart_ledger()
        await eventually(lambda: "renew" in suite.ledger.verbs)
        assert suite.ledger.verbs[suite.ledger.verbs.index("attach") :][:3] == ["attach", "begin", "renew"]
        assert lease.uses == 1
        call.cancel()
        await eventually(lambda: lease.uses == 0)


async def test_a_use_that_ends_while_it_is_told_again_does_not_stay_open():
    # The ledger may carry out the end first: the lease would be busy for ever, and never be asked.
    verbs = Verbs()

    async def insist(call):
        await call("secret")

    uses = LeaseUses(verbs, "lease", lambda: "secret", insist, 3.0, Clock())
    await begun(uses, "use")
    verbs.gate.clear()
    repeating = asyncio.create_task(uses.repeat())
    await asyncio.sleep(0)
    uses.end("use")
    await eventually(lambda: ("end", "use") in verbs.done)
    verbs.gate.set()
    await repeating
    await eventually(lambda: verbs.done[-1] == ("end", "use"))
    assert verbs.done == [("begin", "use"), ("end", "use"), ("begin", "use"), ("end", "use")]
    await uses.aclose()


async def test_the_end_of_a_use_is_told_until_it_is_heard(run_dir):
    async with Suite(run_dir) as suite:
        suite.ledger.lose_ends = 2
        await suite.chat_all()
        await eventually(lambda: suite.ledger.active[0].uses == 0)
        assert suite.ledger.attached == 0


async def test_calls_that_follow_each_other_leave_quiet_moments_between_them(run_dir):
    # With a use from the queue on, an engine that always has somebody waiting is busy for ever, and so nobody else's
    # claim ever gets its memory.
    async with Suite(run_dir) as suite:
        await suite.load_all()
        suite.ledger.verbs.clear()
        await asyncio.gather(*(suite.chat_all() for _ in range(4)))
        await eventually(lambda: suite.ledger.verbs.count("end") == 4)
        assert [verb for verb in suite.ledger.verbs if verb != "renew"] == 4 * ["begin", "end"]
        assert suite.ledger.most_uses == 1


async def test_calls_that_wait_for_their_turn_when_the_model_is_asked_to_vacate_load_it_anew(run_dir):
    async with Suite(run_dir) as suite:
        first = suite.chat("endless")
        await until_event(first, "delta")
        waiting = [asyncio.create_task(suite.chat_all()) for _ in range(2)]
        await eventually(lambda: suite.host.current.queue.waiting == 2)
        suite.ledger.vacate(suite.ledger.active[0].lease_id)
        await eventually(lambda: suite.host.current.hold.vacate.done())
        assert not first.done()
        first.cancel()
        for answer in await asyncio.gather(*waiting):
            assert kinds(answer)[-1] == "finished"
        assert suite.ledger.released == ["VACATED"]
        assert len(suite.ledger.admits) == 2  # one new claim for both


async def test_a_device_that_must_rest_is_waited_for_and_the_caller_told(run_dir):
    time_s = ManualClock()
    async with Suite(run_dir, clock=time_s.clock(), idle_timeout_s=0) as suite:
        suite.ledger.term_s = 1e6
        await suite.load_all()
        suite.ledger.unhealthy_s = REST_S
        call = suite.chat()
        waiting = (await until_event(call, "waiting")).waiting
        [reason] = waiting.reasons
        assert (reason.code, reason.message) == ("DEVICE_UNHEALTHY", "The device is 84 °C warm and rests.")
        await time_s.pass_a_sleep(REST_S)
        assert (await until_event(call, "waiting")).waiting.waited.seconds == REST_S
        suite.ledger.unhealthy_s = None
        await time_s.pass_a_sleep(REST_S)
        assert (await until_event(call, "finished")).finished.usage.output_tokens == 3
        await eventually(lambda: suite.ledger.active[0].uses == 0)


async def test_a_device_is_waited_for_ten_minutes_and_no_longer(run_dir):
    time_s = ManualClock()
    async with Suite(run_dir, clock=time_s.clock(), idle_timeout_s=0) as suite:
        suite.ledger.term_s = 1e6
        await suite.load_all()
        suite.ledger.unhealthy_s = REST_S
        call = suite.chat()
        for _ in range(int(LONGEST_REST_S // REST_S)):
            await until_event(call, "waiting")
            await time_s.pass_a_sleep(REST_S)
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DEVICE_UNHEALTHY")
        assert failure.retry_after_s == REST_S


@pytest.mark.parametrize("ended_by", ["cancel", "unload"])
async def test_a_call_that_is_over_while_the_device_rests_leaves_nothing(run_dir, ended_by):
    time_s = ManualClock()
    async with Suite(run_dir, clock=time_s.clock(), idle_timeout_s=0) as suite:
        suite.ledger.term_s = 1e6
        await suite.load_all()
        suite.ledger.unhealthy_s = REST_S
        call = suite.chat()
        await until_event(call, "waiting")
        if ended_by == "cancel":
            call.cancel()
            await eventually(lambda: not suite.host.current.use.stakes)
        else:
            await suite.unload(force=True)
            assert (await failure_of(call)).reason == "MODEL_UNLOADED"
            assert suite.ledger.verbs.count("begin") == 1  # not asked again for a use that nobody wants
        suite.ledger.unhealthy_s = None
        assert kinds(await suite.chat_all())[-1] == "finished"
        await eventually(lambda: suite.ledger.active[0].uses == 0)


async def test_a_model_asked_to_vacate_while_its_device_rests_is_loaded_anew_for_the_call(run_dir):
    time_s = ManualClock()
    async with Suite(run_dir, clock=time_s.clock(), idle_timeout_s=0) as suite:
        suite.ledger.term_s = 1e6
        await suite.load_all()
        suite.ledger.unhealthy_s = REST_S
        call = suite.chat()
        await until_event(call, "waiting")
        suite.ledger.unhealthy_s = None
        suite.ledger.vacate(suite.ledger.active[0].lease_id)
        assert (await until_event(call, "finished")).HasField("finished")
        assert suite.ledger.released == ["VACATED"]
