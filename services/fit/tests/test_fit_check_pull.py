"""May this download start? Refused only where the model could not run whatever else is running."""

from typing import Any

import grpc
import pytest
from fit_fakes import GIB, FakeLedger, cpu, refusal, unified
from weighbridge_fit import servicer
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.memory.v1 import requirement_pb2


async def test_what_runs_may_be_downloaded(fit: Any, ledger: FakeLedger) -> None:
    checked = await fit.CheckPull(pb.CheckPullRequest(catalog_id="qwen3.5-2b-q4", machine=unified(64 * GIB)))
    assert checked.assessed
    assert checked.assessment.verdict == requirement_pb2.VERDICT_RUNS
    entry = (await fit.GetModel(pb.GetModelRequest(catalog_id="qwen3.5-2b-q4"))).model
    assert checked.model == entry


async def test_what_is_between_bounds_may_be_downloaded(fit: Any, ledger: FakeLedger) -> None:
    checked = await fit.CheckPull(pb.CheckPullRequest(catalog_id="qwen3.5-2b-q4"))
    assert (checked.assessed, checked.assessment.verdict) == (True, requirement_pb2.VERDICT_TIGHT)


@pytest.mark.parametrize("catalog_id", ["laguna-s-2.1-118b-q8", "glm-5.2-754b-q2", "flux-1-dev-q4"])
async def test_what_could_not_run_is_refused_with_the_figures(fit: Any, ledger: FakeLedger, catalog_id: str) -> None:
    failure = await refusal(fit.CheckPull(pb.CheckPullRequest(catalog_id=catalog_id)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_WONT_RUN")
    entry = (await fit.GetModel(pb.GetModelRequest(catalog_id=catalog_id))).model
    assert failure.message.startswith(f"{entry.display_name} would not run here. ")
    assert "GiB" in failure.message
    assert int(failure.metadata["low_bytes"]) > int(failure.metadata["ceiling_bytes"]) == 4 * GIB
    assert int(failure.metadata["file_bytes"]) == entry.file_bytes
    assert failure.metadata["catalog_id"] == catalog_id
    assert failure.metadata["verdict_reason"]
    elsewhere = await fit.CheckPull(pb.CheckPullRequest(catalog_id=catalog_id, machine=unified(512 * GIB)))
    assert elsewhere.assessed


async def test_a_machine_that_is_not_known_stands_in_nobodys_way(fit: Any) -> None:
    checked = await fit.CheckPull(pb.CheckPullRequest(catalog_id="laguna-s-2.1-118b-q8"))
    assert not checked.assessed
    assert checked.assessment.verdict == requirement_pb2.VERDICT_UNKNOWN
    assert checked.assessment.reason_code == "LEDGER_UNREACHABLE"
    assert "ledger" in checked.assessment.reason
    assert checked.model.file_bytes


async def test_a_fault_of_ours_stands_in_nobodys_way(
    fit: Any, ledger: FakeLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(servicer, "answer", broken)
    checked = await fit.CheckPull(pb.CheckPullRequest(catalog_id="sd-1.5", machine=cpu(GIB)))
    assert not checked.assessed
    assert checked.assessment.reason_code == "PRICING_FAILED"
