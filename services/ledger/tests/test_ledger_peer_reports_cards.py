"""What was reported of other programs on machines with several cards, each as a test of this ledger's book.

Named by project and number; see docs/ledger-reports.md. Sizes are GiB where a report has them.
"""

from dataclasses import replace

import pytest
from weighbridge_ledger.book import Ceilings, Claim, DeviceWant, LeaseState

GRANTED = LeaseState.GRANTED
GIB = 2**30


@pytest.mark.parametrize("order", [("11", "24"), ("24", "11")])
def test_ollama_5239_a_model_goes_to_the_card_that_holds_it_whatever_its_number(new_world, order) -> None:
    """A card of 11 GB first, one of 24 second: 17.00 GiB were split in the wrong order and failed."""
    sizes = {"11": 11, "24": 24}
    world = new_world(Ceilings(38 * GIB, {name: sizes[name] * GIB * 95 // 100 for name in order}))
    charge = world.admit(0, devices={"": 17 * GIB}).lease.charge
    assert charge.devices == (("24", 17 * GIB),)
    assert charge.spilled == ()


def test_ollama_17523_a_small_model_goes_to_the_small_card_and_leaves_the_large_one(new_world) -> None:
    """12 + 8 GB: 4.3 GB stayed idle on the small card."""
    world = new_world(Ceilings(38 * GIB, {"12": 12 * GIB * 95 // 100, "8": 8 * GIB * 95 // 100}))
    assert world.admit(0, 1, devices={"": 4 * GIB}).lease.charge.devices == (("8", 4 * GIB),)
    assert world.admit(0, 2, devices={"": 11 * GIB}).lease.charge.devices == (("12", 11 * GIB),)


def test_llama_cpp_21947_a_split_is_held_to_each_card_and_not_to_their_sum(new_world) -> None:
    """A split of 4 to 1 on 12 + 3 GB: it fits as it is split, or it does not, whatever their sum."""
    world = new_world(Ceilings(0, {"a": 12 * 95 // 100 * GIB, "b": int(3 * 0.95 * GIB)}, spill_allowed=False))
    assert world.admit(0, 1, devices={"a": 10 * GIB, "b": int(2.5 * GIB)}).lease.state is GRANTED
    world = new_world(Ceilings(0, {"a": 12 * 95 // 100 * GIB, "b": int(3 * 0.95 * GIB)}, spill_allowed=False))
    assert world.refused(lambda: world.admit(0, 1, devices={"a": 6 * GIB, "b": 6 * GIB})) == "CLAIM_EXCEEDS_CAPACITY"


def test_gpustack_243_each_card_has_the_sum_of_what_is_claimed_on_it(new_world) -> None:
    """What was requested of each card was added up wrong."""
    world = new_world(Ceilings(64, {"a": 24, "b": 24}))
    claim = Claim(2, (DeviceWant("a", 4), DeviceWant("b", 8), DeviceWant("a", 3)))
    world.book.admit(replace(world.ask(0, 1), claim=claim), world.now)
    world.admit(0, 2, devices={"a": 5})
    sums = world.book.committed()
    assert (sums.host_bytes, dict(sums.devices), sums.total_bytes) == (2, {"a": 12, "b": 8}, 22)


def test_koboldcpp_544_what_sits_on_one_card_alone_is_claimed_on_that_card(new_world) -> None:
    """A model was split evenly, but its cache sat on one card, which overflowed: the claim says which card has what."""
    world = new_world(Ceilings(0, {"a": 22, "b": 22}))
    weights, cache = 16, 8
    even = {"a": weights // 2 + cache // 2, "b": weights // 2 + cache // 2}
    true = {"a": weights // 2 + cache, "b": weights // 2}
    world.active(0, 1, devices={"a": 8})
    assert world.book.preview(world.ask(0, 2, devices=even), world.now).charge is not None
    preview = world.book.preview(world.ask(0, 2, devices=true), world.now)
    assert preview.charge is None
    assert preview.reasons[0].missing_bytes == 2
