"""The question that a container's health check asks, and its exit code."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from weighbridge_common import healthcheck
from weighbridge_common.server import RunningServer, ServerContext, start_server
from weighbridge_common.settings import ServiceSettings


@pytest.fixture
async def serving() -> AsyncIterator[RunningServer]:
    """A ledger without any service of its own, in a folder short enough for a socket."""

    async def build(context: ServerContext) -> None:
        return None

    with tempfile.TemporaryDirectory(prefix="wb-") as folder:
        async with await start_server(ServiceSettings(run_dir=str(Path(folder) / "run")), "ledger", build) as running:
            yield running


async def ask(*arguments: str) -> int:
    # The check is a synchronous program: it must not hold the loop that the server runs on.
    return await asyncio.to_thread(healthcheck.main, arguments)


async def test_a_serving_process_is_healthy_by_name_and_by_target(
    serving: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_LEDGER_TARGET", serving.target)
    assert await ask("ledger") == 0
    assert await ask("--target", serving.target) == 0
    assert capsys.readouterr().out.splitlines() == [f"{serving.target}: SERVING"] * 2


async def test_a_service_that_is_not_there_is_not_healthy(
    serving: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await ask("--target", serving.target, "--service", "no.such.Service") == 1
    assert "NOT_FOUND" in capsys.readouterr().err


async def test_nobody_there_is_not_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("--target", f"unix:{tmp_path / 'x.sock'}", "--timeout", "5") == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("ledger", "--target", "unix:/x"), ("no-such-service",)])
def test_wrong_arguments_are_told(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        healthcheck.main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err
