"""Engine options as name=value."""

import pytest
from weighbridge.options import ENGINES, option_names, parse_options
from weighbridge_proto.fit.v1 import plan_pb2


def test_nothing_set_is_nothing() -> None:
    assert parse_options([]) is None


def test_names_decide_the_engine_and_descriptors_the_type() -> None:
    options = parse_options(
        ["kv_bits=4", "allocator_cache_bytes=8589934592", "split_lane=cpu", "adapters=a", "adapters=b"]
    )
    assert options == plan_pb2.EngineOptions(
        mlx=plan_pb2.MlxOptions(kv_bits=4, allocator_cache_bytes=1 << 33, split_lane="cpu", adapters=["a", "b"])
    )
    assert parse_options(["vae_tiling=on", "mmap=no"]) == plan_pb2.EngineOptions(
        sd=plan_pb2.SdOptions(vae_tiling=True, mmap=False)
    )


def test_an_unset_option_stays_unset() -> None:
    options = parse_options(["kv_bits=4"])
    assert options is not None
    assert not options.mlx.HasField("prefill_step_tokens")


@pytest.mark.parametrize(
    ("settings", "engine", "said"),
    [
        (["kv_bits"], None, "name=value"),
        (["=4"], None, "name=value"),
        (["kv_bit=4"], None, r"Did you mean kv_bits\?"),
        (["kv_bits=4"], "sd", "vae_tiling"),
        (["colour=4"], None, "sd: .*vae_tiling"),
        (["kv_bits=four"], None, "whole number"),
        (["kv_bits=4000000000"], None, "too large"),
        (["vae_tiling=perhaps"], None, "on or off"),
        (["split_lane="], None, "needs a value"),
        (["kv_bits=4", "vae_tiling=on"], None, "one engine"),
    ],
)
def test_what_cannot_be_set_is_refused_with_what_can(settings: list[str], engine: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_options(settings, engine)


def test_no_option_belongs_to_two_engines() -> None:
    names = [name for engine in ENGINES for name in option_names(engine)]
    assert len(names) == len(set(names)), "a name alone must decide whose option it is"
