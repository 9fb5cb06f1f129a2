"""The client library against fake servicers on real sockets."""

import asyncio
import inspect
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from weighbridge import CallError, Suite, SyncSuite, parse_machine, reach
from weighbridge.client import chat_message
from weighbridge.diagnosis import check_service
from weighbridge.models import model_at
from weighbridge_proto.engines.v1 import chat_service_pb2, engine_service_pb2
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2, plan_pb2

MIB = 1 << 20


async def test_calls_carry_what_was_asked_and_bring_what_was_answered(fake_suite: Any) -> None:
    async with Suite(fake_suite.environ) as suite:
        workload = plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=2048))
        plan = await suite.plan_model(model_at("/m"), workload=workload, machine=parse_machine("cpu:8"))
        assert plan.model_name == "tiny"
        assert (await suite.describe_weights(model_at("/m"))).facts.tensor_bytes == 1_000_000
        assert (await suite.capacity()).capacity.total.committed_bytes == 512 * MIB
        assert (await suite.engine("mlx").describe()).engine.available
    request = fake_suite.state.asked(fit_service_pb2.PlanModelRequest)[0]
    assert request.model.path == "/m"
    assert request.workload == workload
    assert request.machine.ram_bytes == 8 << 30
    capacity_request = fake_suite.state.requests[2]
    assert not capacity_request.HasField("machine"), "no machine given means the ledger's own"


async def test_every_page_of_leases_is_fetched(fake_suite: Any) -> None:
    first = fake_suite.state.leases[0]
    fake_suite.state.leases = [type(first)(lease_id=f"lease-{number}") for number in range(3)]
    async with Suite(fake_suite.environ) as suite:
        assert [lease.lease_id for lease in (await suite.leases()).leases] == ["lease-0", "lease-1", "lease-2"]


async def test_a_failure_keeps_code_reason_figures_and_message(fake_suite: Any) -> None:
    fake_suite.state.failures["PlanModel"] = RequestError(
        grpc.StatusCode.FAILED_PRECONDITION, "MODEL_WONT_RUN", "It needs 9 GiB.", metadata={"missing_bytes": 5}
    )
    async with Suite(fake_suite.environ) as suite:
        with pytest.raises(CallError) as caught:
            await suite.plan_model(model_at("/m"))
    failure = caught.value.failure
    assert (failure.code, failure.reason, failure.message) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "MODEL_WONT_RUN",
        "It needs 9 GiB.",
    )
    assert failure.metadata["missing_bytes"] == "5"


async def test_a_load_yields_its_events_in_order_and_its_failure_at_the_end(fake_suite: Any) -> None:
    async with Suite(fake_suite.environ) as suite:
        events = [event.WhichOneof("event") async for event in suite.engine("mlx").load(model_at("/m"), pinned=True)]
        assert events == ["planned", "admitted", "starting", "ready"]
        fake_suite.state.failures["LoadModel"] = RequestError(
            grpc.StatusCode.FAILED_PRECONDITION, "CLAIM_EXCEEDS_CAPACITY", "Too large."
        )
        load = suite.engine("mlx").load(model_at("/m"), idle_timeout_s=1.5)
        assert (await anext(load)).HasField("planned")
        with pytest.raises(CallError, match="CLAIM_EXCEEDS_CAPACITY"):
            await anext(load)
    pinned, timed = fake_suite.state.asked(engine_service_pb2.LoadModelRequest)
    assert pinned.pinned
    assert not pinned.HasField("idle_timeout"), "not given means the service's default"
    assert timed.idle_timeout.ToMilliseconds() == 1500


async def test_leaving_a_stream_early_cancels_it_on_the_server(fake_suite: Any) -> None:
    fake_suite.state.hang_after_answer = True
    async with Suite(fake_suite.environ) as suite:
        request = chat_service_pb2.ChatRequest(messages=[chat_message(chat_service_pb2.ROLE_USER, "hi")])
        stream = suite.engine("mlx").chat(request)
        async for event in stream:
            if event.HasField("delta"):
                break
        assert await asyncio.to_thread(fake_suite.state.hanging.wait, 10), "the server is at work"
        await stream.aclose()
        assert await asyncio.to_thread(fake_suite.state.cancelled.wait, 10), "the server would compute for nobody"


async def test_nobody_there_is_unreachable_at_once(run_dir: Path) -> None:
    async with Suite() as suite:
        with pytest.raises(CallError) as caught:
            await suite.capacity()
        assert caught.value.failure.reason == "UNREACHABLE"
        assert "ledger" in caught.value.failure.message
        with pytest.raises(CallError):
            await suite.capacity()  # the channel's back-off must not turn the second try into a wait or another error


async def test_a_service_that_hangs_is_told_from_one_that_is_gone(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped: the kernel takes its connections, so `weighbridge up` would only say that it runs."""
    monkeypatch.setattr(reach, "CONNECT_TIMEOUT_S", 0.3)
    path = run_dir / "ledger.sock"
    assert reach.listener(f"unix:{path}") is None
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        assert reach.listener(f"unix:{path}") is None, "nobody listens yet"
        silent.listen()
        known = os.getpid() if sys.platform == "linux" else reach.UNKNOWN_PROCESS
        assert reach.listener(f"unix:{path}") == known
        async with Suite() as suite:
            with pytest.raises(CallError) as caught:
                await suite.capacity()
            found = await check_service(suite, "ledger", expected=True)
    failure = caught.value.failure
    assert failure.reason == "UNREACHABLE"
    assert "listens and says nothing" in failure.message
    assert "Start the suite" not in failure.message
    assert "listens and says nothing" in found.detail
    if sys.platform == "linux":
        assert f"process {os.getpid()} " in failure.message
        assert found.next_step == f"kill -9 {os.getpid()}"


async def test_patience_waits_for_a_service_that_comes_up(unstarted_suite: Any) -> None:
    async with Suite(patience_s=30) as suite:
        asking = asyncio.create_task(suite.capacity())
        done, _ = await asyncio.wait({asking}, timeout=0.5)
        assert not done
        unstarted_suite.start()
        try:
            assert (await asking).capacity.node_id == "node"
        finally:
            unstarted_suite.stop()


async def test_a_model_is_a_path_here_then_a_catalogue_id_then_a_path_there(
    fake_suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    fake_suite.state.catalog = {"known", "here"}
    async with Suite(fake_suite.environ) as suite:
        assert (await suite.resolve_model("here")).path == str(tmp_path / "here")
        assert (await suite.resolve_model("./here")).path == str(tmp_path / "here")
        assert (await suite.resolve_model("known")).catalog_id == "known"
        assert (await suite.resolve_model("unknown")).path == "unknown"
        assert (await suite.resolve_model("")).path == "", "no name, and not the current folder"
        assert (await suite.resolve_model("sub/model")).path == "sub/model"
        assert (await suite.resolve_model("/nowhere/model")).path == "/nowhere/model"


def test_an_unknown_engine_is_refused_with_the_known_ones(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="mlx, sd, ds4"):
        Suite().engine("mxl")


def test_the_blocking_facade_does_the_same(fake_suite: Any) -> None:
    with SyncSuite(fake_suite.environ) as suite:
        assert suite.resolve_model("sub/model").path == "sub/model"
        assert suite.plan_model(model_at("/m")).model_name == "tiny"
        assert len(suite.leases().leases) == 1
        events = [event.WhichOneof("event") for event in suite.load("mlx", model_at("/m"))]
        assert events[-1] == "ready"
        fake_suite.state.hang_after_answer = True
        for event in suite.chat("mlx", chat_service_pb2.ChatRequest()):
            if event.HasField("delta"):
                assert fake_suite.state.hanging.wait(10), "the server is at work"
                break
        assert fake_suite.state.cancelled.wait(10)
        fake_suite.state.failures["GetCapacity"] = RequestError(grpc.StatusCode.INTERNAL, "BROKEN", "no")
        with pytest.raises(CallError, match="BROKEN"):
            suite.capacity()
    suite.close()


def test_the_blocking_facade_lacks_no_call() -> None:
    of_connections = {"aclose", "reach", "health"}
    calls = {name for name, member in vars(Suite).items() if inspect.iscoroutinefunction(member) and name[0] != "_"}
    assert calls - of_connections <= set(vars(SyncSuite))


def test_the_catalogue_and_the_solvers_answer_blocking_programs_too(fake_suite: Any) -> None:
    state = fake_suite.state
    state.catalog = {"m"}
    state.entry.catalog_id = "m"
    state.fits.fits.extend([fit_service_pb2.ModelFit(catalog_id=name) for name in ("a", "b")])
    with SyncSuite(fake_suite.environ) as suite:
        assert suite.describe_weights(model_at("/m"), include_tensors=True).facts.name == "tiny"
        assert [fit.catalog_id for fit in suite.list_fits(machine=parse_machine("cpu:8")).fits] == ["a", "b"]
        assert [model.catalog_id for model in suite.list_models().models] == ["a", "b"]
        assert suite.check_pull("m").model.catalog_id == "m"
        assert suite.get_model("m").model.catalog_id == "m"
        assert suite.solve_context(model_at("/m"), slots=2).context_tokens == 8192
        assert suite.solve_size(model_at("/m"), aspect=(16, 9)).width_px == 1600
    (size,) = state.asked(fit_service_pb2.SolveSizeRequest)
    assert (size.aspect_width, size.aspect_height) == (16, 9)
    assert state.asked(fit_service_pb2.SolveContextRequest)[0].slots == 2
    assert state.asked(fit_service_pb2.DescribeWeightsRequest)[0].include_tensors


def test_an_interrupted_stream_is_closed_before_the_interrupt_goes_on(run_dir: Path) -> None:
    let_go = threading.Event()

    class SlowToEnd:
        async def chat(self, request: chat_service_pb2.ChatRequest) -> AsyncIterator[chat_service_pb2.ChatResponse]:
            try:
                os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, while the caller waits for the first event
                await asyncio.Event().wait()
                yield chat_service_pb2.ChatResponse()
            finally:
                for _ in range(5):  # letting go of a connection takes some steps of the loop
                    await asyncio.sleep(0)
                let_go.set()

    with SyncSuite() as suite:
        suite._suite.engine = lambda kind: SlowToEnd()  # type: ignore[assignment,method-assign,return-value]
        with pytest.raises(KeyboardInterrupt):
            list(suite.chat("mlx", chat_service_pb2.ChatRequest()))
        assert let_go.is_set()
