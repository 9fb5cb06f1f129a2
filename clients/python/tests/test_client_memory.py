"""`top`, `leases`, `limit` and `ledger`: what people see of the machine's memory, and what they do about it."""

import errno
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from weighbridge.cli import ledger_tools, main
from weighbridge.cli.memory_bars import MemoryFrame, activity, cells, duration_words
from weighbridge.cli.tables import print_limit
from weighbridge_proto.errors import RequestError
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb
from weighbridge_proto.memory.v1 import machine_pb2

GIB = 2**30
NOW = 1_000_000.0
ACTIVE, QUEUED = lease_pb2.LEASE_STATE_ACTIVE, lease_pb2.LEASE_STATE_QUEUED


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def held(lease_id: str, gib: int = 0, card_gib: int = 0, **more: Any) -> lease_pb2.Lease:
    made = lease_pb2.Lease(lease_id=lease_id, state=ACTIVE, holder={"name": f"engine-{lease_id}"}, **more)
    made.purpose.model_name = f"model-{lease_id}"
    made.charge.host_bytes = gib * GIB
    if card_gib:
        made.charge.devices.add(device_id="0", bytes=card_gib * GIB)
    return made


def waiting(lease_id: str, position: int, gib: int, *holders: str) -> lease_pb2.Lease:
    made = lease_pb2.Lease(
        lease_id=lease_id, state=QUEUED, holder={"name": f"engine-{lease_id}"}, queue_position=position
    )
    made.claim.host_bytes = gib * GIB
    made.create_time.FromSeconds(int(NOW) - 12)
    made.wait_reasons.add(code="BYTES_HELD", message=f"Because of {position}.", lease_ids=holders)
    return made


def ceiling(gib: int, committed_gib: int, **more: int) -> machine_pb2.Ceiling:
    return machine_pb2.Ceiling(
        automatic_bytes=gib * GIB, effective_bytes=gib * GIB, committed_bytes=committed_gib * GIB, **more
    )


def capacity() -> machine_pb2.Capacity:
    """A host share of 40 GiB with 10 committed, a card of 20 GiB with 15 committed."""
    card = machine_pb2.Device(device_id="0", name="RTX", total_bytes=24 * GIB)
    return machine_pb2.Capacity(
        pool=machine_pb2.POOL_KIND_DISCRETE,
        total_ram_bytes=64 * GIB,
        host=ceiling(40, 10, free_bytes=30 * GIB, external_bytes=6 * GIB),
        devices=[machine_pb2.DeviceCapacity(device=card, ceiling=ceiling(20, 15))],
        total=ceiling(60, 25),
    )


LEASES = [held("a", 10, 5), waiting("w1", 2, 7), held("b", 0, 10, uses=2), waiting("w0", 1, 50, "a", "b")]


def drawn(width: int, height: int | None = None, leases: list[lease_pb2.Lease] = LEASES, note: str = "") -> list[str]:
    to = Console(file=io.StringIO(), width=width, color_system=None)
    options = to.options if height is None else to.options.update(height=height)
    lines = to.render_lines(MemoryFrame(capacity(), leases, NOW, note), options, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


# -- the picture ---------------------------------------------------------------------------------------------------


def test_bars_are_in_proportion_and_say_whose_each_part_is() -> None:
    lines = drawn(82)
    bars = [line for line in lines if line.startswith("[")]
    # 80 cells: 10 of 40 GiB are 20 of them; 5 and 10 of 20 GiB are 20 and 40.
    assert bars == ["[" + "A" * 20 + "." * 60 + "]", "[" + "A" * 20 + "B" * 40 + "." * 20 + "]"]
    assert lines[2] == "host  10.00 GiB of 40.00 GiB committed, 30.00 GiB free, other programs 6.00 GiB"
    assert "RTX  15.00 GiB of 20.00 GiB committed, free not measured" in lines
    rows = {line.split()[0]: line.split() for line in lines if re.match("[AB] ", line)}
    assert rows["A"][1:] == ["engine-a", "model-a", "idle", "15.00", "GiB"]
    assert rows["B"][1:] == ["engine-b", "model-b", "busy", "(2)", "10.00", "GiB"]


def test_the_queue_stands_in_its_order_with_its_reasons_and_the_marks_of_holders() -> None:
    lines = drawn(100)
    at = lines.index("Waiting: 2")
    assert lines[at + 1 :] == [
        "1. engine-w0: waits for 50.00 GiB since 12 s",
        "   Because of 1. Held by A, B.",
        "2. engine-w1: waits for 7.00 GiB since 12 s",
        "   Because of 2.",
    ]


@pytest.mark.parametrize("width", [10, 20, 33, 47, 48, 60, 71, 72, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    many = [held(f"long-name-{number}", 1, 1) for number in range(60)]
    lines = drawn(width, leases=[*many, *LEASES], note="The ledger went away. Watching goes on when it is back.")
    assert max(map(len, lines)) <= width
    assert max(len(line) for line in lines if line.startswith("[")) == width


def test_what_does_not_fit_the_height_is_counted() -> None:
    whole = len(drawn(80))
    cut = drawn(80, height=8)
    assert len(cut) == 8
    assert cut[-1] == f"{whole - 7} more lines: enlarge the terminal."
    assert len(drawn(80, height=whole)) == whole


def test_an_empty_machine_is_a_picture_too() -> None:
    assert "Nobody holds memory." in drawn(80, leases=[])


@given(amounts=st.lists(st.integers(0, 2**40), max_size=12), spare=st.integers(0, 2**40), width=st.integers(0, 300))
def test_cells_of_a_bar(amounts: list[int], spare: int, width: int) -> None:
    scale = sum(amounts) + spare
    given_cells = cells(amounts, scale, width)
    assert sum(given_cells) <= width
    assert all(count >= 0 for count in given_cells)
    held_by = sum(amount > 0 for amount in amounts)
    if held_by <= width:
        assert all((count > 0) == (amount > 0) for count, amount in zip(given_cells, amounts, strict=True))
    # No cell more than rounding gives and than those need that round to nothing.
    for count, amount in zip(given_cells, amounts, strict=True):
        if scale:
            assert abs(count - amount * width / scale) <= held_by + 1


def test_more_than_the_ceiling_fills_the_bar_and_no_more() -> None:
    """After the limit fell below what is committed."""
    assert cells([30, 30], 20, 40) == [20, 20]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"suspect": True, "uses": 1}, "silent"),
        ({"uses": 1}, "busy"),
        ({"state": lease_pb2.LEASE_STATE_VACATING, "uses": 1}, "vacating"),
        ({"state": lease_pb2.LEASE_STATE_GRANTED}, "granted"),
        ({"last_use_time": {"seconds": int(NOW) - 90}}, "idle 1 min"),
    ],
)
def test_what_a_holder_does(changes: dict[str, Any], words: str) -> None:
    lease = held("a", 1)
    lease.MergeFrom(lease_pb2.Lease(**changes))
    assert activity(lease, NOW) == words


def test_durations() -> None:
    assert [duration_words(s) for s in (-1, 59.9, 60, 3599, 3600, 86_400 * 2)] == [
        "0 s",
        "59 s",
        "1 min",
        "59 min",
        "1 h",
        "2 d",
    ]


# -- top -----------------------------------------------------------------------------------------------------------


def test_top_without_a_terminal_prints_one_picture(fake_suite: Any) -> None:
    for arguments in (("top",), ("top", "--once")):
        result = run(*arguments)
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout
        assert "engine-mlx" in result.stdout and "512.0 MiB of 24.00 GiB committed" in result.stdout
    said = json.loads(run("top", "--json").stdout)
    assert said["leases"][0]["holder"]["name"] == "engine-mlx"
    assert said["capacity"]["node_id"] == "node"


def test_a_name_does_not_steer_the_terminal(fake_suite: Any) -> None:
    for one in (held("a", 1), waiting("b", 1, 3)):
        one.holder.name = f"{one.holder.name}\x1b[2J"
        fake_suite.state.leases = [one]
        for command in ("top", "leases"):
            printed = run(command).stdout
            assert "\x1b" not in printed
            assert f"{one.holder.name[:8]}\\x1b[2J" in printed


def test_top_without_a_ledger_says_so(run_dir: Any) -> None:
    assert run("top").exit_code == 4


STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BAR = re.compile(r"\[A+\.+\]")


class Terminal:
    """A command on a terminal of its own."""

    def __init__(
        self, arguments: tuple[str, ...], environ: dict[str, str], columns: int, rows: int, kind: str = "xterm-256color"
    ) -> None:
        self._main, other = pty.openpty()
        # Whoever runs the tests may have set these (a test runner's workers have), and they go before the terminal.
        outside = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weighbridge", *arguments],
            env={**outside, **environ, "TERM": kind},
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        self.seen = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, wanted: Callable[[str], bool]) -> str:
        """Everything since the last call, as soon as it is `wanted`, or the command has ended."""
        text = ""
        while not wanted(text):
            try:
                read = os.read(self._main, 65536)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                break
            if not read:
                break
            text += read.decode()
        self.seen += text
        return text

    def close(self) -> None:
        os.close(self._main)


def test_top_is_live_follows_changes_and_resizes_and_ends_clean(fake_suite: Any) -> None:
    state = fake_suite.state
    terminal = Terminal(("top",), fake_suite.environ, 100, 30)
    try:
        terminal.until(lambda text: "512.0 MiB of 24.00 GiB" in text)
        assert state.watched.wait(30)
        # A change: what is looked at then is new.
        state.committed = 3 * GIB
        fake_suite.tell(pb.WatchResponse(epoch="e", revision=1))
        terminal.until(lambda text: "3.00 GiB of 24.00 GiB" in text)
        # A resize draws anew, to the new width.
        terminal.resize(60, 20)
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.until(lambda text: any(len(bar) == 60 for bar in BAR.findall(STYLE.sub("", text))))
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(lambda text: False)
        assert terminal.process.wait(30) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        terminal.close()
    assert "Traceback" not in terminal.seen
    # The screen of before is back, and so is the cursor.
    assert terminal.seen.count("\x1b[?1049h") == terminal.seen.count("\x1b[?1049l") == 1
    assert terminal.seen.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in terminal.seen[-40:]


def test_top_on_a_terminal_that_can_only_print_prints_one_picture(fake_suite: Any) -> None:
    terminal = Terminal(("top",), fake_suite.environ, 80, 30, kind="dumb")
    try:
        terminal.until(lambda text: False)
        assert terminal.process.wait(30) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        terminal.close()
    assert "512.0 MiB of 24.00 GiB committed" in terminal.seen
    assert "\x1b" not in terminal.seen


# -- leases and limit ----------------------------------------------------------------------------------------------


def test_leases_say_who_waits_in_which_place_and_what_for(fake_suite: Any) -> None:
    fake_suite.state.leases = [held("a" * 32, 3), waiting("w1", 2, 7), waiting("w0", 1, 50, "a" * 32)]
    lines = run("leases").stdout.splitlines()
    assert any(re.search(r"queued \(1\.\).*engine-w0", line) for line in lines)
    at = next(index for index, line in enumerate(lines) if line.startswith("1. engine-w0: waits for 50.00 GiB since"))
    assert lines[at + 1] == "   Because of 1. Held by aaaaaaaa."
    assert lines[at + 2].startswith("2. engine-w1: waits for 7.00 GiB since")


def test_an_operator_frees_a_lease_by_the_beginning_of_its_id(fake_suite: Any) -> None:
    fake_suite.state.leases = [held("abc" + "0" * 29, 3), held("abd" + "0" * 29, 3)]
    assert run("free", "abc", "--yes").stdout == "abc00000 is released. Its bytes are free.\n"
    asked = fake_suite.state.asked(pb.ReleaseLeaseRequest)[-1]
    assert (asked.lease_id, asked.operator_override, asked.secret) == ("abc" + "0" * 29, True, "")


@pytest.mark.parametrize(("given", "says"), [("ab", "2 leases begin with"), ("x", "no lease begins with")])
def test_a_word_for_no_certain_lease_is_wrong_usage(fake_suite: Any, given: str, says: str) -> None:
    fake_suite.state.leases = [held("abc" + "0" * 29, 3), held("abd" + "0" * 29, 3)]
    result = run("free", given, "--yes")
    assert result.exit_code == 2
    assert says in result.stderr
    assert not fake_suite.state.asked(pb.ReleaseLeaseRequest)


def test_an_operator_who_does_not_say_so_frees_nothing(fake_suite: Any) -> None:
    fake_suite.state.leases = [held("abc" + "0" * 29, 3)]
    assert run("free", "abc").exit_code != 0
    assert not fake_suite.state.asked(pb.ReleaseLeaseRequest)


@pytest.mark.parametrize(
    ("visible", "keeps"), [(True, "until all its processes have ended"), (False, "until it has ended its own engine")]
)
def test_leases_say_what_becomes_of_a_silent_one(fake_suite: Any, visible: bool, keeps: str) -> None:
    silent = held("a" * 32, 3)
    silent.suspect, silent.processes_visible = True, visible
    fake_suite.state.leases = [silent]
    line = f"aaaaaaaa is silent. It keeps its bytes {keeps}; if you know that they have: weighbridge free aaaaaaaa"
    assert line in run("leases").stdout.splitlines()


def test_leases_that_have_ended_say_why(fake_suite: Any) -> None:
    ended = held("a" * 32, 3)
    ended.state = lease_pb2.LEASE_STATE_RELEASED
    ended.end_reason.message = "All its processes have ended."
    fake_suite.state.leases = [ended]
    assert "aaaaaaaa has ended. All its processes have ended." in run("leases", "--all").stdout.splitlines()


def test_limit_is_shown_set_and_taken_back(fake_suite: Any) -> None:
    state = fake_suite.state
    assert run("limit").stdout == "Limit: automatic, which is 24.00 GiB here.\n"
    assert not state.asked(pb.SetLimitRequest)
    assert run("limit", "16GiB").stdout == "Limit: 16.00 GiB. The machine alone allows 24.00 GiB.\n"
    assert state.asked(pb.SetLimitRequest)[-1].limit_bytes == 16 * GIB
    assert json.loads(run("limit", "--json").stdout)["capacity"]["total"]["limit_bytes"] == str(16 * GIB)
    state.committed = 20 * GIB
    assert "20.00 GiB are committed. Nobody is evicted" in run("limit", "16").stdout
    assert run("limit", "AUTO").stdout == "Limit: automatic, which is 24.00 GiB here.\n"
    assert not state.asked(pb.SetLimitRequest)[-1].HasField("limit_bytes")


def test_spilling_is_allowed_and_forbidden_without_touching_the_limit(fake_suite: Any) -> None:
    state = fake_suite.state
    state.limit = 16 * GIB
    for option, allowed in (("--spill", True), ("--no-spill", False)):
        assert run("limit", option).exit_code == 0
        asked = state.asked(pb.SetLimitRequest)[-1]
        assert (asked.limit_bytes, asked.spill_allowed) == (16 * GIB, allowed)
    assert run("limit", "auto").exit_code == 0
    asked = state.asked(pb.SetLimitRequest)[-1]
    assert (asked.HasField("limit_bytes"), asked.HasField("spill_allowed")) == (False, False)


@pytest.mark.parametrize(("allowed", "says"), [(True, "may take host memory"), (False, "waits (--spill lets it")])
def test_limit_says_what_spilling_means_where_there_is_a_card(allowed: bool, says: str) -> None:
    capacity = machine_pb2.Capacity(spill_allowed=allowed, devices=[machine_pb2.DeviceCapacity()])
    with_card, without = io.StringIO(), io.StringIO()
    print_limit(Console(file=with_card, width=200), capacity)
    print_limit(Console(file=without, width=200), machine_pb2.Capacity())
    assert says in with_card.getvalue()
    assert "card" not in without.getvalue()


@pytest.mark.parametrize("wrong", ["0", "-3", "many", "16 parsec", "automatic"])
def test_a_limit_that_is_none_is_wrong_usage(fake_suite: Any, wrong: str) -> None:
    assert run("limit", "--", wrong).exit_code == 2
    assert not fake_suite.state.asked(pb.SetLimitRequest)


def test_a_limit_that_cannot_be_kept_fails(fake_suite: Any) -> None:
    fake_suite.state.failures["SetLimit"] = RequestError(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", "Full.")
    result = run("limit", "16")
    assert (result.exit_code, "STORE_UNAVAILABLE" in result.stderr) == (1, True)


# -- ledger --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "becomes"),
    [
        (
            ("backup", "-f.db", "--database", "d.db", "--force"),
            ["backup", "--database", "d.db", "--force", "--", "-f.db"],
        ),
        (("check",), ["check"]),
        (
            ("check", "f.db", "--machine", "unified:64", "--json"),
            ["check", "--machine", "unified:64", "--json", "--", "f.db"],
        ),
        (("replay", "--json"), ["replay", "--json"]),
        (("replay", "--events", "r.jsonl"), ["replay", "--events", "r.jsonl"]),
    ],
)
def test_a_tool_of_the_ledger_is_run_as_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], becomes: list[str]
) -> None:
    run_as: list[Any] = []
    monkeypatch.setattr(ledger_tools.os, "execv", lambda *call: run_as.append(call))
    tool, *rest = arguments
    files = [one for one in rest if one.endswith("f.db")]
    options = [one for one in rest if not one.endswith("f.db")]
    assert run("ledger", tool, *options, *(["--", *files] if files else [])).exit_code == 0
    assert run_as == [(sys.executable, [sys.executable, "-m", "weighbridge_ledger", *becomes])]


def test_without_a_ledger_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_tools, "is_installed", lambda module: False)
    result = run("ledger", "check")
    assert (result.exit_code, "pip install 'weighbridge[local]'" in result.stderr) == (2, True)


def test_a_tool_s_output_and_exit_code_are_the_command_s(run_dir: Path) -> None:
    pytest.importorskip("weighbridge_ledger")
    done = subprocess.run(
        [sys.executable, "-m", "weighbridge", "ledger", "check", str(run_dir / "none.db"), "--json"],
        env={**os.environ, "WEIGHBRIDGE_LEDGER_MACHINE": "unified:64"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "There is no database" in json.loads(done.stderr)["failure"]
