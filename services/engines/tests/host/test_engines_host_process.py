"""The engine service as a process: killed, stopped, started again, started wrongly."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
from host_fakes import Suite, eventually, failure_of, kinds, process_exists, until_event
from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import chat_service_pb2_grpc, engine_service_pb2_grpc


class ProcessSuite(Suite):
    """Ledger and fit here, the engine service a process."""

    @contextlib.asynccontextmanager
    async def serving(self):
        self._ledger_server = await self._start_ledger()
        from weighbridge_common.server import start_server

        self._fit_server = await start_server(self._plain, "fit", self._build_fit)
        try:
            yield self
        finally:
            await self._ledger_server.stop(0)
            await self._fit_server.stop(0)

    @contextlib.asynccontextmanager
    async def engine_service(self, behaviour=None, **environ):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("engine_process.py")),
            env={
                **os.environ,
                "WEIGHBRIDGE_RUN_DIR": str(self.run_dir),
                "FAKE_RUNTIME": json.dumps(behaviour or {}),
                "WEIGHBRIDGE_ENGINES_STOP_GRACE_S": "0.5",
                **environ,
            },
            stderr=asyncio.subprocess.DEVNULL,
        )
        self.channel = open_channel(f"unix:{self.run_dir}/engine-mlx.sock")
        self.engine = engine_service_pb2_grpc.EngineServiceStub(self.channel)
        self.chats = chat_service_pb2_grpc.ChatServiceStub(self.channel)
        try:
            await asyncio.wait_for(self.channel.channel_ready(), 15)
            yield process
        finally:
            await self.channel.close()
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_a_killed_service_takes_its_engine_along_and_its_successor_starts_clean(run_dir):
    suite = ProcessSuite(run_dir)
    async with suite.serving():
        async with suite.engine_service() as process:
            call = suite.chat("endless")
            await until_event(call, "delta")
            assert len(suite.engine_pids) == 2
            record = json.loads((run_dir / "engine-mlx.processes.json").read_text())
            assert sorted(child["pid"] for child in record["children"]) == sorted(suite.engine_pids)
            process.kill()
            assert (await failure_of(call)).code == grpc.StatusCode.UNAVAILABLE
            await eventually(lambda: not suite.engine_pids, 5)
            await process.wait()
        async with suite.engine_service():
            assert not list(run_dir.glob("*.processes.json"))
            assert not list(run_dir.glob("mlx-*"))
            assert kinds(await suite.chat_all())[-1] == "finished"


async def test_a_service_killed_while_its_engine_is_held_leaves_nothing(run_dir):
    suite = ProcessSuite(run_dir)
    async with suite.serving(), suite.engine_service() as process:
        call = suite.load()
        await until_event(call, "admitted")
        suite.ledger.activate_gate.clear()  # the engine's identity cannot be recorded, so the gate stays shut
        record = run_dir / "engine-mlx.processes.json"
        await eventually(record.exists)
        pids = [child["pid"] for child in json.loads(record.read_text())["children"]]
        assert all(process_exists(pid) for pid in pids)
        process.kill()
        await eventually(lambda: not any(process_exists(pid) for pid in pids), 5)
        suite.ledger.activate_gate.set()


async def test_sigterm_while_an_answer_streams(run_dir):
    suite = ProcessSuite(run_dir)
    async with suite.serving(), suite.engine_service(WEIGHBRIDGE_ENGINES_GRACE_S="0.2") as process:
        call = suite.chat("endless")
        await until_event(call, "delta")
        process.send_signal(signal.SIGTERM)
        assert (await failure_of(call)).code == grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(process.wait(), 10) == 0
        await suite.nothing_left()
        assert suite.ledger.released == ["SERVICE_STOPPED"]
        assert [
            path.name for path in run_dir.iterdir() if "engine" in path.name and not path.name.endswith(".lock")
        ] == []


async def test_sigterm_lets_a_short_answer_end(run_dir):
    suite = ProcessSuite(run_dir)
    async with suite.serving(), suite.engine_service() as process:
        await suite.load_all()
        call = suite.chat("hello")
        await until_event(call, "started")
        process.send_signal(signal.SIGTERM)
        assert kinds([event async for event in call])[-1] == "finished"
        assert await asyncio.wait_for(process.wait(), 10) == 0


def run_main(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "weighbridge_engines", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_a_wrong_kind_or_setting_is_told():
    result = run_main("nothing")
    assert result.returncode == 2
    assert "Usage" in result.stderr
    assert all(kind in result.stderr for kind in ("mlx", "sd", "ds4"))
    result = run_main("mlx", WEIGHBRIDGE_ENGINES_QUEUE_LIMIT="-3")
    assert result.returncode == 2
    assert "WEIGHBRIDGE_ENGINES_QUEUE_LIMIT" in result.stderr
