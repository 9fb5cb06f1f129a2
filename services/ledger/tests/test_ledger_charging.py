"""Rule 2: what a claim is charged, in which pool, and when it is refused whatever else is running.

Expected values are the worked examples of the admission rules and of the reference system's broker.
"""

from weighbridge_ledger.book import Ceilings, Charge, Claim, DeviceWant, External, Shortage
from weighbridge_ledger.book.charging import NOTHING_USED, Usage, price, static_shortage
from weighbridge_ledger.book.placing import on_cards
from weighbridge_ledger.book.resizing import resize
from weighbridge_ledger.book.states import NO_EXTERNAL

GIB = 2**30
TENTH = GIB // 10
# 64 GiB RAM + one 32 GiB card: host share 38.4, card 0.95 of 32 (facts: reference system, worked budgets).
CARD_32 = Ceilings(384 * TENTH, {"gpu": 304 * TENTH})
CARD_32_SPILL = Ceilings(384 * TENTH, {"gpu": 304 * TENTH}, spill_allowed=True)


def on_gpu(size: int, host: int = 0) -> Claim:
    return Claim(host, (DeviceWant("gpu", size),))


def used(*charges: Charge) -> Usage:
    usage = Usage()
    for charge in charges:
        usage.add(charge)
    return usage


def test_a_claim_that_fits_its_card_is_charged_there_alone() -> None:
    assert price(on_gpu(20 * GIB, host=GIB), CARD_32, NO_EXTERNAL, NOTHING_USED) == Charge(GIB, (("gpu", 20 * GIB),))


def test_a_lone_model_larger_than_the_card_spills_even_with_spilling_off() -> None:
    charge = price(on_gpu(40 * GIB), CARD_32, NO_EXTERNAL, NOTHING_USED)
    rest = 40 * GIB - 304 * TENTH
    assert charge == Charge(rest, (("gpu", 304 * TENTH),), (("gpu", rest),))


def test_with_spilling_off_a_second_model_must_fit_the_card() -> None:
    first = Charge(0, (("gpu", 20 * GIB),))
    assert isinstance(price(on_gpu(5 * GIB), CARD_32, NO_EXTERNAL, used(first)), Charge)
    assert isinstance(price(on_gpu(12 * GIB), CARD_32, NO_EXTERNAL, used(first)), Shortage)


def test_with_spilling_off_nobody_joins_a_card_that_a_lease_spilled_from() -> None:
    alone = price(on_gpu(40 * GIB), CARD_32, NO_EXTERNAL, NOTHING_USED)
    assert isinstance(alone, Charge)
    late = price(on_gpu(1), CARD_32, NO_EXTERNAL, used(alone))
    assert isinstance(late, Shortage)
    assert late.cause == "SPILLED_DEVICE"


def test_with_spilling_on_twenty_and_twelve_share_a_card_of_thirty() -> None:
    first = price(on_gpu(20 * GIB), CARD_32_SPILL, NO_EXTERNAL, NOTHING_USED)
    assert isinstance(first, Charge)
    second = price(on_gpu(12 * GIB), CARD_32_SPILL, NO_EXTERNAL, used(first))
    assert isinstance(second, Charge)
    assert first.total_bytes + second.total_bytes == 32 * GIB
    assert used(first, second).on("gpu") == 304 * TENTH


def test_two_host_claims_of_thirty_do_not_pass_over_a_ram_share_of_thirty_eight() -> None:
    """One total over RAM and card would admit both (E)."""
    first = price(Claim(30 * GIB), CARD_32_SPILL, NO_EXTERNAL, NOTHING_USED)
    assert isinstance(first, Charge)
    second = price(Claim(30 * GIB), CARD_32_SPILL, NO_EXTERNAL, used(first))
    assert isinstance(second, Shortage)
    assert second.missing_bytes == 60 * GIB - 384 * TENTH


def test_a_card_of_two_never_takes_six() -> None:
    """The same fault in small: cards of 2 beside a host share of 4 (P)."""
    ceilings = Ceilings(4, {"gpu": 2})
    alone = price(on_gpu(6), ceilings, NO_EXTERNAL, NOTHING_USED)
    assert alone == Charge(4, (("gpu", 2),), (("gpu", 4),))
    assert isinstance(price(on_gpu(7), ceilings, NO_EXTERNAL, NOTHING_USED), Shortage)


def test_the_limit_lies_over_each_card_and_over_everything() -> None:
    limited = Ceilings(40 * GIB, {"gpu": 30 * GIB}, limit_bytes=12 * GIB, spill_allowed=True)
    assert price(on_gpu(12 * GIB), limited, NO_EXTERNAL, NOTHING_USED) == Charge(0, (("gpu", 12 * GIB),))
    assert isinstance(price(on_gpu(13 * GIB), limited, NO_EXTERNAL, NOTHING_USED), Shortage)
    host = Charge(10 * GIB)
    beside = price(on_gpu(3 * GIB), limited, NO_EXTERNAL, used(host))
    assert isinstance(beside, Shortage)
    assert beside.cause == "LIMIT"


def test_static_refusal_ignores_what_is_held_and_what_is_outside() -> None:
    assert static_shortage(Claim(384 * TENTH), CARD_32) is None
    shortage = static_shortage(Claim(384 * TENTH + 1), CARD_32)
    assert shortage is not None
    assert shortage.missing_bytes == 1


def test_external_use_lowers_what_is_left_and_is_named_as_the_cause() -> None:
    ceilings = Ceilings(4)
    outside = External(2)
    assert isinstance(price(Claim(2), ceilings, outside, NOTHING_USED), Charge)
    shortage = price(Claim(3), ceilings, outside, NOTHING_USED)
    assert isinstance(shortage, Shortage)
    assert (shortage.cause, shortage.missing_bytes) == ("EXTERNAL", 1)


def test_external_use_on_a_card_blocks_the_card_only() -> None:
    ceilings = Ceilings(10, {"a": 4, "b": 4})
    outside = External(0, {"a": 4})
    assert isinstance(price(Claim(0, (DeviceWant("a", 1),)), ceilings, outside, NOTHING_USED), Shortage)
    assert isinstance(price(Claim(0, (DeviceWant("b", 4),)), ceilings, outside, NOTHING_USED), Charge)


def test_several_cards_are_all_or_nothing() -> None:
    ceilings = Ceilings(10, {"a": 4, "b": 4})
    both = Claim(0, (DeviceWant("a", 3), DeviceWant("b", 3)))
    holder = Charge(0, (("b", 2),))
    assert isinstance(price(both, ceilings, NO_EXTERNAL, used(holder)), Shortage)


def test_an_unnamed_card_is_the_tightest_one_that_fits() -> None:
    ceilings = Ceilings(10, {"big": 8, "small": 4})
    claim = on_cards(Claim(0, (DeviceWant("", 3),)), ceilings, NO_EXTERNAL, NOTHING_USED)
    assert claim == Claim(0, (DeviceWant("small", 3),))
    full = used(Charge(0, (("small", 4),)))
    assert on_cards(Claim(0, (DeviceWant("", 3),)), ceilings, NO_EXTERNAL, full) == Claim(0, (DeviceWant("big", 3),))


def test_more_unnamed_cards_than_the_machine_has_is_no_target() -> None:
    claim = Claim(0, (DeviceWant("", 1), DeviceWant("", 1)))
    assert on_cards(claim, Ceilings(10, {"a": 4}), NO_EXTERNAL, NOTHING_USED) is None


def test_shrinking_gives_back_what_spilled_first() -> None:
    ceilings = Ceilings(10, {"gpu": 6})
    charge = Charge(4, (("gpu", 6),), (("gpu", 4),))
    assert resize(charge, on_gpu(7), ceilings, NO_EXTERNAL, used(charge)) == Charge(1, (("gpu", 6),), (("gpu", 1),))
    assert resize(charge, on_gpu(5), ceilings, NO_EXTERNAL, used(charge)) == Charge(0, (("gpu", 5),))


def test_shrinking_stays_possible_above_a_lowered_ceiling() -> None:
    charge = Charge(8)
    assert resize(charge, Claim(6), Ceilings(4), NO_EXTERNAL, used(charge)) == Charge(6)
    assert isinstance(resize(charge, Claim(9), Ceilings(4), NO_EXTERNAL, used(charge)), Shortage)


def test_growth_on_a_card_is_placed_by_the_added_bytes_alone() -> None:
    ceilings = Ceilings(10, {"gpu": 6})
    charge = Charge(0, (("gpu", 4),))
    assert resize(charge, on_gpu(6), ceilings, NO_EXTERNAL, used(charge)) == Charge(0, (("gpu", 6),))
    # Alone on the card, it may spill; with a neighbour there it may not.
    assert resize(charge, on_gpu(8), ceilings, NO_EXTERNAL, used(charge)) == Charge(2, (("gpu", 6),), (("gpu", 2),))
    neighbour = Charge(0, (("gpu", 1),))
    assert isinstance(resize(charge, on_gpu(8), ceilings, NO_EXTERNAL, used(charge, neighbour)), Shortage)
