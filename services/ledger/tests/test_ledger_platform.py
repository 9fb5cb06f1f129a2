"""Operating system and processor of a machine: some engines place weights by it."""

import dataclasses
from pathlib import Path

import pytest
from weighbridge_ledger.machine import messages
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.model import Source
from weighbridge_ledger.machine.probe import ThisMachine
from weighbridge_ledger.machine.recorded import from_json, to_json
from weighbridge_proto.memory.v1 import machine_pb2

RECORDED = Path(__file__).parent / "machine_readings"


def platform_of(readings) -> str:
    return interpret(readings, node_id="n", source=Source.DETECTED).machine.platform


def test_an_old_recording_of_a_mac_is_known_by_its_sysctl() -> None:
    assert platform_of(from_json((RECORDED / "mac-m3-max-64.json").read_text())) == "darwin/arm64"


def test_a_translated_process_does_not_make_a_mac_an_intel_one() -> None:
    readings = from_json((RECORDED / "mac-m3-max-64.json").read_text())
    assert platform_of(dataclasses.replace(readings, processor="x86_64")) == "darwin/arm64"


def test_a_recording_that_does_not_say_is_not_guessed() -> None:
    assert platform_of(from_json((RECORDED / "two-cards-24.json").read_text())) == ""


def test_this_machine_says_what_it_is_and_a_recording_keeps_it() -> None:
    readings = ThisMachine().read()
    assert platform_of(readings).count("/") == 1
    assert from_json(to_json(readings)).processor == readings.processor


def test_a_what_if_machine_has_the_platform_it_is_given() -> None:
    message = machine_pb2.Machine(ram_bytes=2**34, platform="darwin/arm64")
    assert messages.machine_from_proto(message)[0].platform == "darwin/arm64"
    message.platform = "x" * 65
    with pytest.raises(messages.InvalidMachineError):
        messages.machine_from_proto(message)
