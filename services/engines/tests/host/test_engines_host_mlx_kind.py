"""What the MLX kind supplies: versions, command, refusals."""

import sys
from pathlib import Path

import grpc
import pytest
from weighbridge_engines.mlx_qwen import kind as kind_module
from weighbridge_engines.mlx_qwen.build_hash import engine_build
from weighbridge_engines.mlx_qwen.kernel_cache import default_folder, private_folder
from weighbridge_engines.mlx_qwen.kind import MlxKind, classify
from weighbridge_engines.supervisor.exits import ExitCause
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2, plan_pb2
from weighbridge_proto.targets import MAX_SOCKET_PATH_BYTES


def mlx_plan(**fields):
    plan = fit_service_pb2.PlanModelResponse(model_name="m", resolved_path="/models/m", **fields)
    plan.launch.mlx.slots = 3
    return plan


def test_the_child_is_our_runtime_on_a_private_socket_with_little_of_our_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("WEIGHBRIDGE_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    child = MlxKind(kernels=tmp_path / "kernels").launch(mlx_plan(), Path("/tmp/w")).child
    assert child.argv == (
        sys.executable, "-m", "weighbridge_engines.mlx_qwen.runtime", "--socket", "/tmp/w/rt",
    )  # fmt: skip
    assert "SECRET_TOKEN" not in child.environ
    assert child.environ["TMPDIR"] == str(tmp_path / "kernels")  # MLX loads code from there
    assert child.environ["WEIGHBRIDGE_OTLP_ENDPOINT"] == "http://127.0.0.1:4317"
    assert MlxKind().slots(mlx_plan()) == 3


def test_a_run_folder_in_which_the_service_can_listen_has_room_for_its_runtimes_socket_too(tmp_path):
    """A service that starts must not find out at each load that the path of its runtime's socket is too long."""
    run_dir = Path("/r" * 100)
    while len(str(run_dir / "engine-mlx.sock")) > MAX_SOCKET_PATH_BYTES:
        run_dir = Path(str(run_dir)[:-2])
    workspace = run_dir / "mlx-0f0f0f"  # as residencies name theirs
    socket = MlxKind(kernels=tmp_path / "kernels").launch(mlx_plan(), workspace).child.argv[-1]
    assert Path(socket).parent == workspace


def test_plans_that_it_cannot_start_are_refused():
    MlxKind().check_plan(mlx_plan())
    with pytest.raises(RequestError, match="not a model that the MLX engine loads"):
        MlxKind().check_plan(fit_service_pb2.PlanModelResponse(model_name="m", resolved_path="/x"))
    facts_only = mlx_plan()
    facts_only.resolved_path = ""
    with pytest.raises(RequestError, match="planned, not loaded"):
        MlxKind().check_plan(facts_only)
    with pytest.raises(RequestError, match="INVALID_OPTION"):
        MlxKind().check_options(plan_pb2.EngineOptions(ds4=plan_pb2.Ds4Options()))


@pytest.mark.parametrize(
    "options",
    [
        {"adapters": ["a"]},
        {"draft_model": "d"},
        {"draft_head": True},
        {"prompt_cache_bytes": 1},
        {"expert_slab_bytes": 1},
        {"split_lane": "cpu"},
    ],
)
def test_options_that_are_priced_and_not_there_are_refused_before_anything_is_planned(options):
    with pytest.raises(RequestError) as caught:
        MlxKind().check_options(plan_pb2.EngineOptions(mlx=plan_pb2.MlxOptions(kv_bits=8, **options)))
    assert caught.value.failure.reason == "OPTION_NOT_IMPLEMENTED"
    assert caught.value.failure.code is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.failure.metadata["options"] == next(iter(options))


def test_options_that_change_nothing_are_no_reason_to_refuse():
    idle = plan_pb2.MlxOptions(kv_bits=8, draft_head=False, split_lane="none", prompt_cache_bytes=0)
    MlxKind().check_options(plan_pb2.EngineOptions(mlx=idle))


def test_without_mlx_lm_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(kind_module, "package_version", lambda name: None)
    description = MlxKind().describe()
    assert "pip install" in description.unavailable_reason
    assert description.engine_build == ""


def test_the_build_changes_with_the_runtimes_source(tmp_path):
    (tmp_path / "a.py").write_text("1")
    before = engine_build(packages=["grpcio"], runtime=tmp_path)
    assert len(before) == 64
    assert engine_build(packages=["grpcio"], runtime=tmp_path) == before
    (tmp_path / "a.py").write_text("2")
    assert engine_build(packages=["grpcio"], runtime=tmp_path) != before
    assert engine_build(packages=["grpcio", "no-such-package"], runtime=tmp_path) != before


def test_a_lack_of_memory_on_the_gpu_is_recognised():
    line = "libc++abi: terminating due to [METAL] Command buffer execution failed: Insufficient Memory (0x8)"
    assert classify(line).cause is ExitCause.OUT_OF_MEMORY
    assert classify("loading") is None


def test_kernels_are_kept_in_a_folder_that_nobody_else_can_write(tmp_path):
    folder, fallback = tmp_path / "cache" / "kernels", tmp_path / "own"
    assert private_folder(folder, fallback) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder(folder, fallback) == folder
    folder.chmod(0o777)
    assert private_folder(folder, fallback) == fallback
    (tmp_path / "file").touch()
    assert private_folder(tmp_path / "file" / "kernels", fallback) == fallback
    (tmp_path / "link").symlink_to(tmp_path)
    assert private_folder(tmp_path / "link", fallback) == fallback


def test_where_kernels_are_kept():
    assert default_folder({"HOME": "/h"}) == Path("/h/.cache/weighbridge/mlx-kernels")
    assert default_folder({"HOME": "/h", "XDG_CACHE_HOME": "/c"}) == Path("/c/weighbridge/mlx-kernels")
    assert default_folder({"HOME": "/h", "XDG_CACHE_HOME": "relative"}) == Path("/h/.cache/weighbridge/mlx-kernels")
