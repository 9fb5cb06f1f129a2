"""Graphics cards of /sys/class/drm: from files of a made-up system, and what any text in them may lead to."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_ledger.machine.drm import interpret_drm
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.model import GIB, LARGEST_CARD_BYTES, Pool
from weighbridge_ledger.machine.probe_drm import DrmFolder
from weighbridge_ledger.machine.readings import DrmReading, Readings, TemperatureReading
from weighbridge_ledger.machine.recorded import from_json, to_json

AMDGPU_IDS = "# comment\n1.0.0\n744C,\tC8,\tAMD Radeon RX 7900 XTX\n744C,\tCC,\tAMD Radeon RX 7900 XT\n"
PCI_IDS = (
    "# comment\n1002  Advanced Micro Devices, Inc. [AMD/ATI]\n\t744c  Navi 31 [Radeon RX 7900 XT/7900 XTX]\n"
    "8086  Intel Corporation\n\t56a0  DG2 [Arc A770]\n\t\t1849 5001  a board of it\n10de  NVIDIA Corporation\n"
    "\t2204  GA102 [GeForce RTX 3090]\n"
)


def add_card(root: Path, number: int, driver: str, pci: str, files: dict[str, str | bytes], node: bool = True) -> None:
    device = root / "sys/devices/pci0000:00" / pci
    (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
    (device / "drm" / f"renderD{128 + number}").mkdir(parents=True)
    (device / "driver").symlink_to(root / "sys/bus/pci/drivers" / driver)
    for name, content in files.items():
        path = device / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    card = root / "sys/class/drm" / f"card{number}"
    card.mkdir(parents=True)
    (card / "device").symlink_to(device)
    (root / "sys/class/drm" / f"card{number}-DP-1").mkdir()
    if node:
        (root / "dev/dri").mkdir(parents=True, exist_ok=True)
        (root / "dev/dri" / f"renderD{128 + number}").touch()


XTX = {
    "vendor": "0x1002\n",
    "device": "0x744c\n",
    "revision": "0xc8\n",
    "unique_id": "9e8d7c6b5a493827\n",
    "mem_info_vram_total": "25753026560\n",
    "mem_info_vram_used": "1289814016\n",
    "mem_info_gtt_total": "33665323008\n",
    # Size 0x78, format 1 (cards), content 3.
    "gpu_metrics": bytes([0x78, 0, 1, 3]) + bytes(116),
    "hwmon/hwmon4/name": "amdgpu\n",
    "hwmon/hwmon4/temp1_input": "45000\n",
    "hwmon/hwmon4/temp1_label": "edge\n",
    "hwmon/hwmon4/temp1_crit": "100000\n",
    "hwmon/hwmon4/power1_average": "22000000\n",
}


def test_an_amd_card_read_from_its_files(tmp_path: Path) -> None:
    add_card(tmp_path, 0, "amdgpu", "0000:03:00.0", XTX)
    (tmp_path / "usr/share/libdrm").mkdir(parents=True)
    (tmp_path / "usr/share/libdrm/amdgpu.ids").write_text(AMDGPU_IDS)
    (card,) = DrmFolder(tmp_path).read()
    assert (card.name, card.driver, card.pci, card.usable) == ("card0", "amdgpu", "0000:03:00.0", True)
    assert card.product == "AMD Radeon RX 7900 XTX"
    assert card.files["gpu_metrics"] == "1.3"
    (device,) = interpret_drm((card,), nvml_answers=False).devices
    assert (device.total_bytes, device.used_bytes, device.integrated) == (25753026560, 1289814016, False)
    assert device.temperatures == (TemperatureReading("edge", 45.0, 100.0),)
    readings = Readings("linux", ram_bytes=64 * GIB, drm=(card,))
    assert from_json(to_json(readings)) == readings


def test_cards_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        add_card(tmp_path, number, "amdgpu", f"0000:{number:02x}:00.0", {"vendor": "0x1002\n"})
    assert [card.name for card in DrmFolder(tmp_path).read()] == ["card0", "card2", "card10"]


def test_a_container_sees_a_card_that_it_was_not_given(tmp_path: Path) -> None:
    add_card(tmp_path, 0, "amdgpu", "0000:03:00.0", XTX, node=False)
    (card,) = DrmFolder(tmp_path).read()
    assert card.usable is False
    found = interpret_drm((card,), nvml_answers=False)
    assert (found.devices, [finding.reason for finding in found.findings]) == ((), ["DEVICE_NOT_GIVEN"])


@pytest.mark.parametrize("folder", ["hwdata", "misc"])
@pytest.mark.parametrize(
    ("vendor", "device", "product"),
    [
        ("0x8086", "0x56a0", "Intel DG2 [Arc A770]"),
        ("0x1002", "0x744c", "AMD Navi 31 [Radeon RX 7900 XT/7900 XTX]"),
        ("0x10de", "0x2204", "NVIDIA Corporation GA102 [GeForce RTX 3090]"),
        ("0x8086", "0x2204", ""),  # another vendor's device of that number
        ("0x1a03", "0x2000", ""),
    ],
)
def test_names_from_the_systems_table(tmp_path: Path, folder: str, vendor: str, device: str, product: str) -> None:
    add_card(tmp_path, 0, "any", "0000:03:00.0", {"vendor": vendor, "device": device, "revision": "0x00"})
    (tmp_path / "usr/share" / folder).mkdir(parents=True)
    (tmp_path / "usr/share" / folder / "pci.ids").write_text(PCI_IDS)
    assert DrmFolder(tmp_path).read()[0].product == product


def test_the_tables_are_read_once(tmp_path: Path) -> None:
    add_card(tmp_path, 0, "amdgpu", "0000:03:00.0", XTX)
    ids = tmp_path / "usr/share/libdrm/amdgpu.ids"
    ids.parent.mkdir(parents=True)
    ids.write_text(AMDGPU_IDS)
    folder = DrmFolder(tmp_path)
    before = folder.read()
    ids.unlink()
    assert folder.read() == before


def test_without_sensors_no_temperature_is_read_but_an_apu_is_still_known(tmp_path: Path) -> None:
    files = {**XTX, "hwmon/hwmon4/in1_label": "vddnb\n", "gpu_metrics": b""}
    add_card(tmp_path, 0, "amdgpu", "0000:03:00.0", files)
    (card,) = DrmFolder(tmp_path).read(sensors=False)
    (device,) = interpret_drm((card,), nvml_answers=False).devices
    assert (device.temperatures, device.integrated) == ((), True)


def test_intels_memory_is_the_sum_of_its_tiles(tmp_path: Path) -> None:
    files = {"vendor": "0x8086\n", "tile0/physical_vram_size_bytes": "0x200000000\n"}
    add_card(tmp_path, 0, "xe", "0000:3a:00.0", {**files, "tile1/physical_vram_size_bytes": "8589934592\n"})
    add_card(tmp_path, 1, "i915", "0000:4a:00.0", {"vendor": "0x8086\n", "lmem_total_bytes": "17179869184\n"})
    cards = DrmFolder(tmp_path).read()
    devices = interpret_drm(cards, nvml_answers=False).devices
    assert [(device.total_bytes, device.integrated) for device in devices] == [(16 * GIB, False), (16 * GIB, False)]


def test_a_system_without_graphics_reads_nothing(tmp_path: Path) -> None:
    assert DrmFolder(tmp_path).read() == ()


def amd(name: str = "card0", product: str = "", **files: str) -> DrmReading:
    return DrmReading(name, "amdgpu", f"0000:0{name[-1]}:00.0", product, True, {"vendor": "0x1002\n", **files})


@pytest.mark.parametrize(
    ("card", "integrated"),
    [
        (amd(gpu_metrics="1.3"), False),
        (amd(gpu_metrics="2.4"), True),
        (amd(gpu_metrics="3.0"), True),
        (amd(**{"hwmon/in1_label": "vddnb\n"}), True),
        # The name of an APU on a card that nobody named yet: the driver is right.
        (amd(product="AMD Radeon Graphics", gpu_metrics="1.3"), False),
        # CPU and GPU on one HBM, with the metrics of a card.
        (amd(product="AMD Instinct MI300A", gpu_metrics="1.4"), True),
        (amd(product="AMD Instinct MI300X", gpu_metrics="1.4"), False),
        (amd(), None),
    ],
)
def test_who_shares_the_hosts_memory(card: DrmReading, integrated: bool | None) -> None:
    assert interpret_drm((card,), nvml_answers=False).devices[0].integrated is integrated


def test_partitions_of_one_card_are_devices_of_their_own() -> None:
    cards = tuple(amd(f"card{number}", unique_id="a1", gpu_metrics="1.4") for number in range(2))
    devices = interpret_drm(cards, nvml_answers=False).devices
    assert [device.device_id for device in devices] == ["pci-0000:00:00.0", "pci-0000:01:00.0"]


@pytest.mark.parametrize(
    ("driver", "vendor"), [("ast", "0x1a03"), ("virtio-pci", "0x1af4"), ("vmwgfx", "0x15ad"), ("", "")]
)
def test_screens_without_a_processor_are_no_devices(driver: str, vendor: str) -> None:
    found = interpret_drm((DrmReading("card0", driver, files={"vendor": vendor}),), nvml_answers=False)
    assert (found.devices, found.findings) == ((), ())


@pytest.mark.parametrize("driver", ["asahi", "msm"])
def test_gpus_of_arm_systems_share_the_memory(driver: str) -> None:
    result = interpret(Readings("linux", ram_bytes=16 * GIB, drm=(DrmReading("card0", driver),)))
    assert (result.machine.pool, result.machine.devices) == (Pool.UNIFIED, ())


NAMES = st.sampled_from(
    ["vendor", "device", "unique_id", "mem_info_vram_total", "mem_info_vram_used", "mem_info_gtt_total",
     "lmem_total_bytes", "tile0/physical_vram_size_bytes", "gpu_metrics", "hwmon/temp1_input", "hwmon/temp1_crit",
     "hwmon/in1_label"]
)  # fmt: skip
TEXTS = st.one_of(
    st.integers(-(2**70), 2**70).map(str), st.text(max_size=12), st.sampled_from(["0x1002", "0x8086", "2.0", "vddnb"])
)
CARDS = st.builds(
    DrmReading,
    st.just("card0"),
    st.sampled_from(["amdgpu", "xe", "asahi", ""]),
    st.sampled_from(["", "0000:00:02.0", "0000:03:00.0"]),
    st.text(max_size=20),
    st.sampled_from([True, False, None]),
    st.dictionaries(NAMES, TEXTS),
)


@given(st.lists(CARDS, max_size=3))
def test_whatever_stands_there_leads_to_a_machine_that_can_be(cards: list[DrmReading]) -> None:
    machine = interpret(Readings("linux", ram_bytes=32 * GIB, ram_available_bytes=GIB, drm=tuple(cards))).machine
    assert all(0 < device.total_bytes <= LARGEST_CARD_BYTES for device in machine.devices)
    assert (machine.pool is Pool.DISCRETE) == bool(machine.devices)
