"""What ds4's files are made of: published sizes to the byte, from a header on disk, from tensors, and from a size."""

import dataclasses
from pathlib import Path

import pytest
from weighbridge_fit.calibration.ds4 import ds4
from weighbridge_fit.describe import describe
from weighbridge_fit.facts import TensorFact, WeightFacts, WeightFormat
from weighbridge_fit.families.ds4 import Ds4Family
from weighbridge_fit.families.registry import recognise
from weighbridge_fit.model import Model
from weighbridge_fit.plans.ds4.shape import Ds4Weights, Family, weights_of
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.plan import Engine

from services.fit.tests.fit_ds4_layout import (
    FLASH_RATIOS,
    HEADER_BYTES,
    MIB,
    entry,
    facts_of,
    flash,
    listed,
    tensor,
    write_sparse,
)

NON_ROUTED = 8_801_384_796


def read(facts: WeightFacts) -> Ds4Weights:
    return weights_of(Model(facts), ds4())


@pytest.mark.parametrize(
    ("tensors", "tensor_bytes", "file_bytes", "routed"),
    [
        (flash("q2"), 86_714_775_900, 86_720_111_488, 77_913_391_104),
        (flash("q2", q4_layers=range(37, 43)), 97_586_411_868, 97_591_747_456, 88_785_027_072),
        (flash("q4"), 164_628_167_004, 164_633_502_592, 155_826_782_208),
        # This file's metadata is 288 bytes shorter.
        (flash("mxfp4"), 155_971_123_548, 155_976_458_848 + 288, 147_169_738_752),
    ],
    ids=["Q2", "Q2 with Q4 in six layers", "Q4", "MXFP4"],
)
def test_published_files_to_the_byte(
    tensors: tuple[TensorFact, ...], tensor_bytes: int, file_bytes: int, routed: int
) -> None:
    facts = facts_of(tensors)
    assert (len(tensors), facts.tensor_bytes, facts.file_bytes) == (1328, tensor_bytes, file_bytes)
    weights = read(facts)
    assert weights.non_routed.low == weights.non_routed.expected == weights.non_routed.high == NON_ROUTED
    assert weights.mapped_bytes == file_bytes
    assert weights.experts is not None
    cached = weights.experts.layers * weights.experts.experts * weights.experts.expert_bytes
    assert cached + weights.experts.bypass_bytes == routed == tensor_bytes - NON_ROUTED


def test_the_measures_come_from_shapes() -> None:
    weights = read(facts_of(flash()))
    assert weights.family is Family.V4
    assert weights.context == ds4().flash
    assert weights.context is not None and weights.context.ratios == FLASH_RATIOS
    assert weights.experts is not None
    assert (weights.experts.layers, weights.experts.experts, weights.experts.expert_bytes) == (43, 256, 7_077_888)
    assert (weights.hidden_size, weights.vocab_size, weights.largest_tensor_bytes) == (4096, 129_280, 1_059_061_760)
    assert not weights.pro


def test_experts_of_another_size_go_past_the_cache() -> None:
    experts = read(facts_of(flash("q2", q4_layers=range(37, 43)))).experts
    assert experts is not None
    assert (experts.layers, experts.expert_bytes) == (37, 7_077_888)
    assert experts.bypass_bytes == 6 * 256 * 14_155_776


def test_a_file_on_disk_and_its_size_alone_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "flash.gguf"
    write_sparse(path, flash())
    assert path.stat().st_blocks * 512 < 4 * MIB, "86 GB of holes, not of disk"
    facts = describe(path, lambda found: found)
    model = Model(facts, paths={"": str(path)})
    assert Ds4Family().recognises(model)
    family = recognise(model)
    assert family is not None and family.engine is Engine.DS4
    by_header = read(facts)
    by_size = weights_of(listed("deepseek-v4-flash-284b-q2"), ds4())
    same = ("family", "non_routed", "embedding_bytes", "largest_tensor_bytes", "hidden_size", "experts", "context")
    for name in same:
        assert getattr(by_header, name) == getattr(by_size, name), name
    assert by_size.mapped_bytes == 86_720_111_488
    assert abs(by_header.mapped_bytes - by_size.mapped_bytes) <= HEADER_BYTES


@pytest.mark.parametrize(
    ("catalog_id", "experts", "expert_mib"),
    [
        ("deepseek-v4-flash-284b-q2", 11_008, 6.75),
        ("deepseek-v4-flash-284b-q4", 11_008, 13.5),
        ("deepseek-v4-flash-284b-mxfp4", 11_008, 12.75),
        ("deepseek-v4-flash-284b-q2q4", 37 * 256, 6.75),
    ],
)
def test_the_catalogue_is_known_by_its_sizes(catalog_id: str, experts: int, expert_mib: float) -> None:
    weights = weights_of(listed(catalog_id), ds4())
    assert weights.non_routed.expected == NON_ROUTED
    assert weights.experts is not None
    assert weights.experts.layers * weights.experts.experts == experts
    assert weights.experts.expert_bytes / MIB == expert_mib


def test_glm_keeps_19_6_gib_beside_its_experts() -> None:
    weights = weights_of(listed("glm-5.2-754b-q2"), ds4())
    assert weights.family is Family.GLM
    assert round(weights.non_routed.expected / 2**30, 1) == 19.6
    # gate and up in IQ2_XXS (66 bytes for 256), down alike: 6144 x 2048 x 3 weights.
    assert weights.experts is not None
    assert weights.experts.expert_bytes == 6144 * 2048 * 3 // 256 * 66


def v41_tensors(experts_type: str = "IQ2_XXS") -> tuple[TensorFact, ...]:
    """V4.1 in small: what matters is which names stay on disk."""
    return (
        tensor("token_embd.weight", "F16", 5120, 1000),
        tensor("blk.0.engram_embd.weight", "I8", 264, 1_000_000),
        tensor("blk.1.engram_rows.weight", "I8", 264, 500_000),
        tensor("blk.0.engram_kv.weight", "F16", 512, 5120),
        tensor("blk.0.ffn_gate_exps.weight", experts_type, 5120, 2304, 384),
        tensor("blk.0.ffn_up_exps.weight", experts_type, 5120, 2304, 384),
        tensor("blk.0.ffn_down_exps.weight", experts_type, 2304, 5120, 384),
    )


def test_engram_tables_are_never_resident_and_their_projections_are() -> None:
    weights = read(facts_of(v41_tensors(), "deepseek41", header=0))
    assert weights.family is Family.V41
    assert weights.disk_only_bytes == 264 * 1_500_000
    assert weights.non_routed.expected == 5120 * 1000 * 2 + 512 * 5120 * 2
    routed = 3 * 5120 * 2304 * 384 // 256 * 66
    assert weights.mapped_bytes == weights.non_routed.expected + routed
    assert weights.largest_tensor_bytes == routed // 3


def test_the_published_v41_files() -> None:
    for size, resident, expert in (
        (365_713_686_528, 162_935_654_128, 9_953_280),
        (518_596_067_328, 315_818_034_928, 19_906_560),
    ):
        bare = dataclasses.replace(
            listed("deepseek-v4-flash-284b-q2").facts, file_bytes=size, architecture="deepseek41"
        )
        weights = read(bare)
        assert weights.mapped_bytes == resident
        assert weights.disk_only_bytes == 202_778_032_400
        assert weights.non_routed.expected == 10_061_367_744
        assert weights.experts is not None and weights.experts.expert_bytes == expert


def test_a_size_that_no_published_file_has_is_a_range() -> None:
    bare = dataclasses.replace(listed("deepseek-v4-flash-284b-q2").facts, file_bytes=430_000_000_000)
    weights = read(bare)
    assert weights.family is Family.OTHER and weights.context is None and weights.experts is None
    assert weights.non_routed.low < weights.non_routed.expected < weights.non_routed.high < weights.mapped_bytes


def test_companions_in_an_entry_are_not_the_model() -> None:
    own = entry("deepseek-v4-flash-284b-q2")
    drafter = dataclasses.replace(own.files[0], path="drafter.gguf", component="drafter", size_bytes=5 << 30)
    both = dataclasses.replace(own, files=(*own.files, drafter))
    facts = dataclasses.replace(listed(own.catalog_id).facts, file_bytes=both.weight_bytes)
    assert weights_of(Model(facts, entry=both), ds4()).mapped_bytes == own.files[0].size_bytes


PLAIN = (tensor("token_embd.weight", "F16", 64, 64), tensor("blk.0.ffn_up.weight", "F16", 64, 64))


@pytest.mark.parametrize(
    ("facts", "recognised"),
    [
        (facts_of(flash(), "deepseek4"), True),
        (facts_of(v41_tensors(), "deepseek41"), True),
        (facts_of(v41_tensors(), "glm-dsa"), True),
        (facts_of(flash(), "llama"), False),
        (facts_of(flash(), ""), False),
        (facts_of(PLAIN, "deepseek4"), False),
        (dataclasses.replace(facts_of(flash()), format=WeightFormat.SAFETENSORS), False),
        (dataclasses.replace(facts_of(flash()), files=facts_of(flash()).files * 2), False),
    ],
    ids=["V4", "V4.1", "GLM", "another architecture", "none", "no stacked experts", "not GGUF", "split"],
)
def test_which_models_are_ds4s(facts: WeightFacts, recognised: bool) -> None:
    assert Ds4Family().recognises(Model(facts)) is recognised


@pytest.mark.parametrize(
    "facts",
    [
        facts_of(flash(), "llama"),
        dataclasses.replace(facts_of(flash()), format=WeightFormat.SAFETENSORS),
        dataclasses.replace(facts_of(flash()), files=facts_of(flash()).files * 2),
        dataclasses.replace(facts_of((), header=0), file_bytes=0),
    ],
    ids=["another architecture", "not GGUF", "split", "no size"],
)
def test_what_ds4_cannot_load_is_refused(facts: WeightFacts) -> None:
    with pytest.raises(PlanError) as refused:
        read(facts)
    assert refused.value.reason == "UNSUPPORTED_ARCHITECTURE"


def test_shapes_that_no_honest_file_has_are_no_crash() -> None:
    strange = (
        TensorFact("token_embd.weight", "F16", (), 1, 2),
        TensorFact("blk.0.attn_kv.weight", "Q8_0", (0, 0), 0, 0),
        TensorFact("blk.0.attn_compressor_ape.weight", "F16", (1, 1 << 60), 1 << 60, 1),
        TensorFact("blk.0.ffn_gate_exps.weight", "Q2_K", (1, 1, 0), 0, 5),
        TensorFact("blk.9999.ffn_gate_exps.weight", "Q2_K", (1, 1, 1 << 60), 1 << 60, 5),
        TensorFact("blk.0.engram_embd.weight", "I8", (0, 3), 0, 0),
    )
    weights = read(facts_of(strange, header=0))
    assert weights.experts is None
