"""What a refusal and a wait say: the figures that the reference system's tests pin in its denial texts.

In the reference system one denial has both: what the machine allows, and what others hold. Here a claim that the empty
machine can take is never refused for what others hold, it waits: so the second half stands in the reason of the wait.
"""

import re

import pytest
from weighbridge_ledger.book import Ceilings, Charge, Claim, DeviceWant, Shortage
from weighbridge_ledger.book.charging import NOTHING_USED, Usage, price, static_shortage
from weighbridge_ledger.book.states import NO_EXTERNAL, External
from weighbridge_ledger.book.texts import exceeds_text, waits_text

GIB = 2**30
TENTH = GIB // 10

RAM_16 = Ceilings(10_307_921_510, ram_bytes=16 * GIB)
"""9.6 GiB of 16, without a card."""

CARD_24 = Ceilings(384 * TENTH, {"gpu": 228 * TENTH}, ram_bytes=64 * GIB)
CARD_32 = Ceilings(384 * TENTH, {"gpu": 304 * TENTH}, ram_bytes=64 * GIB)


def on_card(gib: float, host_gib: int = 0) -> Claim:
    return Claim(host_gib * GIB, (DeviceWant("gpu", int(gib * GIB)),))


def refusal(claim: Claim, ceilings: Ceilings) -> str:
    shortage = static_shortage(claim, ceilings)
    assert shortage is not None
    return exceeds_text(claim, shortage, ceilings)


def used(*charges: Charge) -> Usage:
    usage = Usage()
    for charge in charges:
        usage.add(charge)
    return usage


def wait(claim: Claim, ceilings: Ceilings, usage: Usage, external: External = NO_EXTERNAL) -> str:
    assert static_shortage(claim, ceilings) is None
    shortage = price(claim, ceilings, external, usage)
    assert isinstance(shortage, Shortage)
    return waits_text(claim, shortage, ceilings, external, usage)


# -- refused ----------------------------------------------------------------------------------------------------------


def test_a_refusal_names_the_model_the_share_the_machine_and_the_percentage() -> None:
    """14,326,180,192 bytes against 10,307,921,510 on 16 GiB: 13.3, 9.6, 16.0, 60 %."""
    text = refusal(Claim(14_326_180_192), RAM_16)
    for figure in ("13.3", "9.6", "16.0", "60 %"):
        assert figure in text


def test_a_percentage_is_rounded_as_people_do() -> None:
    """10 of 16: 63 %."""
    assert "63 %" in refusal(Claim(11 * GIB), Ceilings(10 * GIB, ram_bytes=16 * GIB))


def test_where_the_memory_is_not_known_no_percentage_is_made_up() -> None:
    assert "%" not in refusal(Claim(11 * GIB), Ceilings(10 * GIB))


def test_a_refusal_on_a_card_names_both_pools_and_no_percentage() -> None:
    """70 GiB on 64 GiB of RAM and a 24 GiB card: 22.8 of graphics memory, 38.4 of host memory."""
    text = refusal(on_card(70), CARD_24)
    assert re.search(r"22\.80 GiB of graphics memory", text)
    assert re.search(r"38\.40 GiB of host memory", text)
    assert "%" not in text


def test_a_model_on_the_processor_is_not_told_of_graphics_memory() -> None:
    text = refusal(Claim(50 * GIB), CARD_24)
    assert "needs 50.00 GiB of host memory. This machine gives models 38.40 GiB of it" in text
    assert "graphics" not in text


def test_a_refusal_by_the_limit_says_so_and_that_a_higher_one_would_do() -> None:
    text = refusal(on_card(20), Ceilings(384 * TENTH, {"gpu": 228 * TENTH}, limit_bytes=12 * GIB))
    assert "12.00 GiB" in text
    assert "A higher limit" in text


def test_a_higher_limit_is_not_promised_to_help_a_model_beyond_the_machine() -> None:
    text = refusal(on_card(70), Ceilings(384 * TENTH, {"gpu": 228 * TENTH}, limit_bytes=12 * GIB))
    assert "limit" not in text
    assert "22.80 GiB of graphics memory on that card and 38.40 GiB of host memory" in text


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_a_wait_names_what_others_hold() -> None:
    """Committed 18: names 18.0."""
    text = wait(Claim(14_326_180_192), Ceilings(30 * GIB), used(Charge(18 * GIB)))
    assert "other models hold 18.00 GiB of 30.00 GiB" in text


def test_a_claim_that_the_card_rule_keeps_waiting_is_told_to_wait_or_to_allow_spilling() -> None:
    """Memory exists, only the rule of the card is in the way: advice to use a smaller model would be wrong."""
    for claim in (on_card(12), on_card(40)):
        text = wait(claim, CARD_32, used(Charge(0, (("gpu", 20 * GIB),))))
        assert "20.00 GiB of 30.40 GiB" in text
        assert "wait, or allow spilling" in text


def test_a_claim_beside_a_model_that_spilled_is_told_to_wait_or_to_allow_spilling() -> None:
    rest = 40 * GIB - 304 * TENTH
    spilled = Charge(rest, (("gpu", 304 * TENTH),), (("gpu", rest),))
    text = wait(on_card(5), CARD_32, used(spilled))
    assert "too large for the card" in text
    assert "allow spilling" not in text  # the card is full: there is nothing to spill from
    held = Charge(rest, (("gpu", 20 * GIB),), (("gpu", rest),))
    assert "wait, or allow spilling" in wait(on_card(5), CARD_32, used(held))


def test_spilling_is_not_advised_where_it_would_not_help() -> None:
    full = used(Charge(384 * TENTH, (("gpu", 20 * GIB),)))
    assert "spilling" not in wait(on_card(12), CARD_32, full)


def test_spilling_is_not_advised_where_other_programs_hold_the_host_memory() -> None:
    usage = used(Charge(0, (("gpu", 20 * GIB),)))
    assert "spilling" in wait(on_card(12), CARD_32, usage)
    assert "spilling" not in wait(on_card(12), CARD_32, usage, External(38 * GIB))


def test_no_wait_advises_a_smaller_model() -> None:
    waits = [
        wait(on_card(12), CARD_32, used(Charge(0, (("gpu", 20 * GIB),)))),
        wait(Claim(20 * GIB), Ceilings(32 * GIB), used(Charge(20 * GIB))),
        wait(Claim(20 * GIB), Ceilings(32 * GIB), NOTHING_USED, External(20 * GIB)),
        wait(Claim(8 * GIB), Ceilings(32 * GIB, limit_bytes=12 * GIB), used(Charge(6 * GIB))),
    ]
    assert not [text for text in waits if "smaller" in text]


def test_a_wait_under_the_limit_says_that_a_higher_one_would_do() -> None:
    limited = Ceilings(384 * TENTH, {"gpu": 228 * TENTH}, limit_bytes=12 * GIB)
    text = wait(on_card(8), limited, used(Charge(6 * GIB)))
    assert "6.00 GiB of the 12.00 GiB that the limit allows" in text
    assert "A higher limit" in text


# -- all of them ------------------------------------------------------------------------------------------------------

HELD_20 = Charge(0, (("gpu", 20 * GIB),))

TEXTS = {
    "refused": lambda: refusal(Claim(14_326_180_192), RAM_16),
    "refused on a card": lambda: refusal(on_card(70), CARD_24),
    "refused on both": lambda: refusal(on_card(20, host_gib=45), CARD_24),
    "refused by the limit": lambda: refusal(
        on_card(20), Ceilings(384 * TENTH, {"gpu": 228 * TENTH}, limit_bytes=12 * GIB)
    ),
    "waits for others": lambda: wait(Claim(20 * GIB), Ceilings(32 * GIB), used(Charge(20 * GIB))),
    "waits by the card's rule": lambda: wait(on_card(12), CARD_32, used(HELD_20)),
    "waits for programs": lambda: wait(Claim(20 * GIB), Ceilings(32 * GIB), NOTHING_USED, External(20 * GIB)),
    "waits under the limit": lambda: wait(
        Claim(8 * GIB), Ceilings(32 * GIB, limit_bytes=12 * GIB), used(Charge(6 * GIB))
    ),
    "waits to be alone": lambda: waits_text(
        on_card(5), Shortage("gpu", 0, "EXCLUSIVE"), CARD_32, NO_EXTERNAL, used(HELD_20)
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_no_text_has_byte_counts_or_names_of_settings(case: str) -> None:
    text = TEXTS[case]()
    assert not re.search(r"\d{10}", text.replace(",", ""))
    assert "_" not in text
    assert text.endswith(".")
