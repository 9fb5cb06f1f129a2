"""Every catalogue model on a grid of machines: WONT_RUN exactly where the empty ledger refuses the claim."""

from collections import Counter

import pytest
import weighbridge_catalog
from weighbridge_fit.catalog.resolve import known_by_sizes
from weighbridge_fit.catalog.store import Catalogue
from weighbridge_fit.listing import fit_of
from weighbridge_fit.wire.machine import capacity_from
from weighbridge_ledger.book.charging import NOTHING_USED, static_shortage
from weighbridge_ledger.book.placing import on_cards
from weighbridge_ledger.book.states import NO_EXTERNAL
from weighbridge_ledger.machine.capacity import assemble
from weighbridge_ledger.machine.ceilings import ceilings_for
from weighbridge_ledger.machine.messages import capacity_to_proto
from weighbridge_ledger.machine.model import Device, Machine, Pool, Source
from weighbridge_ledger.service.messages import claim_of
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

GIB = 1 << 30
ENTRIES = Catalogue(weighbridge_catalog.MODELS, None).snapshot().entries
TIERS = (plan_pb2.QUALITY_TIER_UNSPECIFIED, plan_pb2.QUALITY_TIER_HIGH)


def machine(pool: Pool, ram: int, *cards: int) -> Machine:
    devices = tuple(Device(f"card{number}", "card", size * GIB) for number, size in enumerate(cards))
    return Machine("node", pool, ram * GIB, devices, Source.DECLARED)


MACHINES = {
    **{f"unified:{ram}": (machine(Pool.UNIFIED, ram), "darwin/arm64") for ram in (8, 16, 32, 64, 128, 256, 512)},
    "unified:128 linux": (machine(Pool.UNIFIED, 128), "linux/arm64"),
    **{f"cpu:{ram}": (machine(Pool.CPU, ram), "linux/x86_64") for ram in (4, 16, 64, 256)},
    **{f"discrete:64+{card}": (machine(Pool.DISCRETE, 64, card), "linux/x86_64") for card in (6, 12, 24, 80)},
    "discrete:16+24": (machine(Pool.DISCRETE, 16, 24), "win32/x86_64"),
    "discrete:64+24+24": (machine(Pool.DISCRETE, 64, 24, 24), "linux/x86_64"),
    "discrete:256+80+80+80": (machine(Pool.DISCRETE, 256, 80, 80, 80), "linux/x86_64"),
}
LIMITS = (None, 6 * GIB, 40 * GIB)


@pytest.mark.parametrize("name", MACHINES)
def test_a_model_is_refused_by_both_or_by_neither(name: str) -> None:
    seen: Counter[int] = Counter()
    described, platform = MACHINES[name]
    for limit in LIMITS:
        ceilings = ceilings_for(described, limit)
        message = capacity_to_proto(assemble(described, limit_bytes=limit))
        message.platform = platform
        capacity = capacity_from(machine_pb2.Capacity.FromString(message.SerializeToString()))
        for entry in ENTRIES.values():
            for tier in TIERS:
                found = fit_of(entry, known_by_sizes(entry), tier, capacity)
                placed = on_cards(claim_of("claim", found.claim), ceilings, NO_EXTERNAL, NOTHING_USED)
                refused = placed is None or static_shortage(placed, ceilings) is not None
                verdict = found.assessment.verdict
                seen[verdict] += 1
                assert refused == (verdict == requirement_pb2.VERDICT_WONT_RUN), (entry.catalog_id, limit, found)
                assert found.assessment.reason_code != "PRICING_FAILED", entry.catalog_id
    assert sum(seen.values()) == len(LIMITS) * len(TIERS) * 58
    assert seen[requirement_pb2.VERDICT_WONT_RUN], "a limit of 6 GiB refuses the large ones"
    assert seen[requirement_pb2.VERDICT_RUNS] or name in ("cpu:4", "unified:8")
