"""What leases hold on cards that the kernel accounts by process, and in host memory that GPUs were given."""

import subprocess
import sys
from pathlib import Path

import pytest
from weighbridge_common import processes
from weighbridge_ledger.book.states import Charge
from weighbridge_ledger.machine.fdinfo import CardUse, DrmClient, parse_fdinfo, tree_uses, uses_by_card
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.model import GIB, Device, LiveDevice, LiveMemory, Machine, Pool
from weighbridge_ledger.machine.recorded import from_json
from weighbridge_ledger.service.attribution import EngineUse, attribute, measure_engines

RECORDED = Path(__file__).parent / "machine_readings"
MIB, KIB = 2**20, 2**10
PCI = "0000:03:00.0"

# As kernels write it: amdgpu 6.8, amdgpu 6.14 (new names beside the old ones), xe, i915.
AMDGPU = (
    "pos:\t0\nflags:\t02100002\ndrm-driver:\tamdgpu\ndrm-client-id:\t12\ndrm-pdev:\t0000:03:00.0\npasid:\t32771\n"
    "drm-memory-vram:\t20971520 KiB\ndrm-memory-gtt: \t65536 KiB\ndrm-memory-cpu: \t0 KiB\ndrm-engine-compute:\t9 ns\n"
)
AMDGPU_NEW = (
    "drm-driver:\tamdgpu\ndrm-client-id:\t13\ndrm-pdev:\t0000:03:00.0\ndrm-total-vram:\t8 MiB\n"
    "drm-resident-vram:\t6 MiB\ndrm-memory-vram:\t7 MiB\ndrm-total-gtt:\t4096\ndrm-resident-gtt:\t0\n"
)
XE = (
    "drm-driver:\txe\ndrm-client-id:\t4\ndrm-pdev:\t0000:03:00.0\ndrm-total-system:\t0\ndrm-resident-system:\t0\n"
    "drm-total-gtt:\t384 KiB\ndrm-resident-gtt:\t384 KiB\ndrm-total-vram0:\t51200 KiB\ndrm-resident-vram0:\t51200 KiB\n"
    "drm-resident-vram1:\t1 MiB\ndrm-total-cycles-rcs:\t9000000000\n"
)
I915 = (
    "drm-driver:\ti915\ndrm-client-id:\t7\ndrm-pdev:\t0000:03:00.0\ndrm-total-local0:\t2 MiB\n"
    "drm-resident-local0:\t1 MiB\n"
)


@pytest.mark.parametrize(
    ("text", "client"),
    [
        (AMDGPU, DrmClient(PCI, "12", CardUse(20 * GIB, 64 * MIB))),
        (AMDGPU_NEW, DrmClient(PCI, "13", CardUse(6 * MIB, 0))),
        (XE, DrmClient(PCI, "4", CardUse(51 * MIB, 384 * KIB))),
        (I915, DrmClient(PCI, "7", CardUse(MIB, 0))),
        ("pos:\t0\nflags:\t02\nmnt_id:\t3\n", None),
        ("drm-driver:\tvgem\ndrm-client-id:\t7\n", None),
        ("drm-client-id:\t7\ndrm-pdev:\tx\ndrm-memory-vram:\tlots\n", DrmClient("x", "7", CardUse())),
    ],
)
def test_what_one_open_file_says(text: str, client: DrmClient | None) -> None:
    assert parse_fdinfo(text) == client


def test_a_client_is_counted_once_however_many_files_and_processes_have_it() -> None:
    one = DrmClient(PCI, "12", CardUse(GIB, MIB))
    other, elsewhere = DrmClient(PCI, "13", CardUse(2 * GIB)), DrmClient("0000:04:00.0", "12", CardUse(GIB))
    assert uses_by_card([one, one, other, elsewhere]) == {PCI: CardUse(3 * GIB, MIB), "0000:04:00.0": CardUse(GIB)}


def test_the_files_of_a_process(tmp_path: Path) -> None:
    process = tmp_path / "proc/2147483000"  # no such process: only the made-up folder
    (process / "fd").mkdir(parents=True)
    (process / "fdinfo").mkdir()
    for number, target in {"0": "/dev/null", "3": "/dev/dri/renderD128", "4": "/dev/dri/renderD128"}.items():
        (process / "fd" / number).symlink_to(target)
        (process / "fdinfo" / number).write_text(AMDGPU)
    assert tree_uses([2147483000], tmp_path) == {PCI: CardUse(20 * GIB, 64 * MIB)}
    assert tree_uses([2147483001], tmp_path) is None, "gone, or somebody else's"


def test_a_process_without_graphics_holds_nothing_on_cards() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as engine:
        identity = processes.identify(engine.pid)
        assert identity is not None
        use = measure_engines((identity,), LiveMemory(devices=(LiveDevice("d", pci=PCI),)))
        engine.communicate(b"\n")
    if sys.platform == "linux":
        assert use.cards == {}
    assert use.host_bytes is not None
    assert measure_engines((), LiveMemory()) == EngineUse()


def lease(host: int, **devices: int) -> "View":
    return View(host, tuple((name.replace("_", "-"), size) for name, size in devices.items()))


class View:
    """A lease as far as attribution looks at it: one engine, pid 7, and a charge. It has reported nothing."""

    observed = None

    def __init__(self, host: int, devices: tuple[tuple[str, int], ...]) -> None:
        self.lease = self
        self.engines = (processes.ProcessIdentity(7, 1, "boot", "ns"),)
        self.charge = Charge(host, devices)


def test_an_engines_weights_on_an_amd_card_are_not_a_strangers() -> None:
    machine = Machine("n", Pool.DISCRETE, 64 * GIB, (Device("card", "RX 7900 XTX", 24 * GIB),))
    live = LiveMemory(host_used_bytes=10 * GIB, devices=(LiveDevice("card", 3 * GIB, 21 * GIB, pci=PCI),))
    use = EngineUse(2 * GIB, {PCI: CardUse(20 * GIB, GIB)})
    external = attribute(machine, live, [lease(3 * GIB, card=20 * GIB)], [use])
    # On the card 21 in use, 20 of them the engine's. On the host 10, of them its own 2 and 1 that its GPU was given.
    assert (external.device_bytes("card"), external.host_bytes) == (GIB, 7 * GIB)


def test_what_an_apus_gpu_was_given_is_its_engines() -> None:
    live = interpret(from_json((RECORDED / "strix-halo-raised.json").read_text())).live
    machine = Machine("n", Pool.UNIFIED, 128 * GIB)
    (gpu,) = live.devices
    live = LiveMemory(host_used_bytes=70 * GIB, devices=live.devices)
    use = EngineUse(2 * GIB, {gpu.pci: CardUse(512 * MIB, 60 * GIB)})
    assert attribute(machine, live, [lease(64 * GIB)], [use]).host_bytes == 8 * GIB


def test_without_an_account_the_holders_report_is_all_there_is() -> None:
    machine = Machine("n", Pool.DISCRETE, 64 * GIB, (Device("card", "RX 7900 XTX", 24 * GIB),))
    live = LiveMemory(devices=(LiveDevice("card", 3 * GIB, 21 * GIB, pci=PCI),))
    assert attribute(machine, live, [lease(0, card=20 * GIB)], [EngineUse()]).device_bytes("card") == 21 * GIB
