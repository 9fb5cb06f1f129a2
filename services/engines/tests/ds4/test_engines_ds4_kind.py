"""What the ds4 engine tells the host: which build is here, which plans it takes, how it is started."""

import socket
from pathlib import Path

import grpc
import pytest
from weighbridge_engines.ds4 import binary, checkpoints, lock
from weighbridge_engines.ds4.kind import Ds4Kind
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.fit.v1 import plan_pb2

from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.program import write_standin

CUDA = Behaviour(compute="cuda")


def plan_of(model: Path, *more: str, compute: str = "cuda", sessions: int = 1) -> fit_pb.PlanModelResponse:
    plan = fit_pb.PlanModelResponse(model_name="flash", model_digest="digest", resolved_path=str(model))
    launch = plan.launch.ds4
    launch.arguments.extend(["--model", str(model), f"--{compute}", "--ctx", "4096", *more])
    launch.context_tokens, launch.sessions, launch.prefill_chunk_tokens = 4096, sessions, 4096
    launch.compute = compute
    return plan


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    return path


@pytest.fixture
def kind_of(tmp_path: Path):
    """A kind that has found a stand-in of this behaviour."""

    def made(behaviour: Behaviour = CUDA, **settings) -> Ds4Kind:
        (tmp_path / "bin").mkdir(exist_ok=True)
        return Ds4Kind(
            str(write_standin(tmp_path / "bin", behaviour)),
            **{
                "lock_file": str(tmp_path / "ds4.lock"),
                "checkpoints_root": tmp_path / "kv",
                "cache": tmp_path / "cache",
                **settings,
            },
        )

    return made


def described(kind: Ds4Kind) -> Ds4Kind:
    assert kind.describe().unavailable_reason == ""
    return kind


def refusal(call, *arguments) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(RequestError) as refused:
        call(*arguments)
    failure = refused.value.failure
    return failure.code, failure.reason, failure.message


def test_a_build_is_told_by_what_it_computes_on_and_its_hash(kind_of) -> None:
    found = kind_of().describe()
    assert (found.unavailable_reason, len(found.engine_build)) == ("", 64)
    assert "cuda" in found.runtime_version
    assert found.engine_build.startswith(found.runtime_version.split()[1].rstrip(","))


def test_without_a_build_everything_is_refused_with_what_to_do(tmp_path: Path, model: Path) -> None:
    kind = Ds4Kind(str(tmp_path / "nope"))
    found = kind.describe()
    assert "WEIGHBRIDGE_ENGINES_DS4_SERVER" in found.unavailable_reason
    code, reason, message = refusal(kind.check_plan, plan_of(model))
    assert (code, reason, message) == (
        grpc.StatusCode.FAILED_PRECONDITION, "ENGINE_UNAVAILABLE", found.unavailable_reason
    )  # fmt: skip


def test_a_metal_build_is_started_where_its_kernels_sources_are(kind_of, tmp_path: Path, model: Path) -> None:
    kind = kind_of(Behaviour(compute="metal"))
    assert "metal" in kind.describe().unavailable_reason
    sources = tmp_path / "bin" / "metal"
    sources.mkdir()
    (sources / "dense.metal").touch()
    launch = described(kind).launch(plan_of(model, compute="metal"), tmp_path)
    assert launch.child.cwd == tmp_path / "bin"


def test_a_build_for_rocm_is_not_used(tmp_path: Path) -> None:
    program = write_standin(tmp_path, Behaviour(compute="cpu"))
    program.write_text(program.read_text() + "# .hip_fatbin\n")
    assert "ROCm" in Ds4Kind(str(program), cache=tmp_path / "cache").describe().unavailable_reason


@pytest.mark.parametrize(("build", "layout"), [("2026-05", "2026-05"), ("2026-07", "2026-07"), ("2026-09", "2026-07")])
def test_what_the_build_is_decides_the_plan_unless_somebody_says_otherwise(kind_of, build: str, layout: str) -> None:
    kind = described(kind_of(Behaviour(compute="cuda", build=build)))
    options = plan_pb2.EngineOptions()
    kind.complete_options(options)
    assert (options.ds4.compute, options.ds4.engine_layout) == ("cuda", layout)
    options = plan_pb2.EngineOptions()
    options.ds4.compute, options.ds4.engine_layout = "cpu", "2026-05"
    kind.complete_options(options)
    assert (options.ds4.compute, options.ds4.engine_layout) == ("cpu", "2026-05")


def test_options_of_another_engine_are_refused(kind_of) -> None:
    options = plan_pb2.EngineOptions()
    options.sd.backend = "cuda"
    assert refusal(kind_of().check_options, options)[1] == "INVALID_OPTION"
    kind_of().check_options(plan_pb2.EngineOptions())


def test_plans_of_other_engines_and_of_no_files_are_refused(kind_of, model: Path) -> None:
    kind = described(kind_of())
    kind.check_plan(plan_of(model))
    planned_only = plan_of(model)
    planned_only.resolved_path = ""
    for plan in (planned_only, fit_pb.PlanModelResponse(model_name="picture", resolved_path="/m")):
        assert refusal(kind.check_plan, plan)[1] == "UNSUPPORTED_ARCHITECTURE"


@pytest.mark.parametrize(
    ("build", "more", "compute"),
    [
        ("2026-05", ("--ssd-streaming", "--ssd-streaming-cache-experts", "32GB"), "cuda"),
        ("2026-07", ("--vision", "/v.gguf"), "cuda"),
        ("2026-09", (), "metal"),
    ],
)
def test_a_plan_that_the_build_cannot_honour_is_refused_before_anything_is_claimed(
    kind_of, model: Path, build: str, more: tuple[str, ...], compute: str
) -> None:
    kind = described(kind_of(Behaviour(compute="cuda", build=build)))
    code, reason, message = refusal(kind.check_plan, plan_of(model, *more, compute=compute))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ENGINE_LACKS_FEATURE")
    assert (more or (f"--{compute}",))[0] in message


def test_another_ds4_is_told_before_anything_is_claimed(kind_of, model: Path, monkeypatch) -> None:
    kind = described(kind_of())
    monkeypatch.setattr(lock, "holder_outside", lambda file: 4711)
    code, reason, message = refusal(kind.check_plan, plan_of(model))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ENGINE_LOCKED")
    assert "4711" in message


def test_it_is_started_on_a_free_port_of_loopback_with_nothing_of_the_service_s(
    kind_of, tmp_path: Path, model: Path, monkeypatch
) -> None:
    monkeypatch.setenv("DS4_CUDA_DIRECT_MODEL", "1")
    child = described(kind_of()).launch(plan_of(model), tmp_path).child
    arguments = list(child.argv)
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", int(arguments[arguments.index("--port") + 1])))
    assert (child.cwd, child.environ["DS4_LOCK_FILE"]) == (tmp_path, str(tmp_path / "ds4.lock"))
    assert [name for name in child.environ if name.startswith("DS4_")] == ["DS4_LOCK_FILE"]
    assert "DS4_LOCK_FILE" not in described(kind_of(lock_file="")).launch(plan_of(model), tmp_path).child.environ


def test_conversations_go_to_a_folder_of_this_model_s_own(kind_of, tmp_path: Path, model: Path) -> None:
    kind = described(kind_of())
    assert "--kv-disk-dir" not in kind.launch(plan_of(model), tmp_path).child.argv
    assert not (tmp_path / "kv").exists()
    arguments = kind.launch(plan_of(model, "--kv-disk-space-mb", "16384"), tmp_path).child.argv
    folder = Path(arguments[arguments.index("--kv-disk-dir") + 1])
    assert folder.parent == tmp_path / "kv"
    assert folder.name.endswith("-4096-cuda")
    assert folder.is_dir()


def test_a_model_on_a_broken_disk_is_told_as_that(
    kind_of, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_model: Path) -> str:
        raise OSError(5, "Input/output error")

    kind = described(kind_of())
    monkeypatch.setattr(checkpoints, "fingerprint", broken)
    code, reason, message = refusal(kind.launch, plan_of(model, "--kv-disk-space-mb", "16384"), tmp_path)
    assert (code, reason) == (grpc.StatusCode.INTERNAL, "ENGINE_START_FAILED")
    assert message.startswith(f"The model file {model} cannot be read (Input/output error).")


def test_it_is_given_as_many_requests_as_it_holds_conversations(kind_of, model: Path) -> None:
    kind = kind_of()
    assert [kind.slots(plan_of(model, sessions=sessions)) for sessions in (0, 1, 4)] == [1, 1, 4]


def test_it_has_the_time_that_its_models_take(kind_of, tmp_path: Path, model: Path) -> None:
    kind = described(kind_of())
    assert kind.least_start_timeout_s >= 600
    assert kind.least_stop_grace_s >= 30
    second = kind.launch(plan_of(model), tmp_path).child.second_term_after_s
    assert second is not None
    assert 0 < second < kind.least_stop_grace_s


def test_what_was_probed_is_kept(kind_of, tmp_path: Path) -> None:
    build = described(kind_of()).describe().engine_build
    assert (tmp_path / "cache" / f"{build}.json").exists()
    assert binary.PROGRAM.cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/weighbridge/ds4-server")
