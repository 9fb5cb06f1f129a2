"""Sixteen clients that ask, hold, use, resize, cancel and release at random, as processes, while they and the ledger
are killed and stopped again and again (see `torture`).

WEIGHBRIDGE_TORTURE_OPERATIONS sets how many verbs are sent (default 1,000; `make torture` sends 10,000).
"""

import os
import tempfile
from pathlib import Path

from weighbridge_ledger.tools.recording import play

from services.ledger.tests.torture.driver import torture
from services.ledger.tests.torture.table import CEILINGS

SEED = 7


async def test_no_byte_is_held_twice_and_none_stays_charged() -> None:
    operations = int(os.environ.get("WEIGHBRIDGE_TORTURE_OPERATIONS", "1000"))
    # Paths of unix sockets are short; pytest's folders may not be.
    with tempfile.TemporaryDirectory(prefix="torture-", dir="/tmp") as folder:
        figures = await torture(Path(folder), operations, SEED)
    print(figures.summary())
    assert figures.faults == []
    assert figures.unsound == []
    assert figures.left_bytes == 0
    # Played again from what was told: no transition raised a sum above its ceiling, no state was walked back, fences
    # rose, and no revision is missing but where the watch was told so.
    played = play(figures.changes)
    assert played.findings == []
    assert 0 < played.gaps <= figures.blows["ledger killed"], "only a new epoch makes a gap here"
    # And something did happen.
    assert all(figures.blows.values())
    assert figures.outcomes["resize", "OK"]
    assert figures.outcomes["attach", "OK"]
    assert figures.told["vacate"]
    assert max(played.peaks[pool] / CEILINGS[pool] for pool in CEILINGS) > 0.5
