"""Whether a holder is told that the ledger can see its processes, and so has to fence itself or not (rule 12)."""

import pytest

from services.ledger.tests.conftest import World


@pytest.mark.parametrize(("namespace", "visible"), [("", True), ("pid:[2]", False)])
async def test_a_holder_is_told_with_its_grant_whether_its_processes_are_seen(ledger, namespace, visible) -> None:
    process = World.process(1, namespace=namespace) if namespace else World.process(1)
    request = ledger.request(1)
    request.holder.process.CopyFrom(process.to_message())
    call = ledger.stub.Admit(request)
    assert (await call.read()).granted.lease.processes_visible is visible
