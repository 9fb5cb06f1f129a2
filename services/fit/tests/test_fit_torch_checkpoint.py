"""Torch checkpoints: facts as torch itself sees them, malformed files as errors, and nothing ever executed."""

import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from weighbridge_fit.budget import ParseBudget
from weighbridge_fit.describe import describe
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import FileFacts
from weighbridge_fit.files import open_regular
from weighbridge_fit.torch_checkpoint import contents, legacy, stack
from weighbridge_fit.torch_checkpoint.dtypes import DTYPES, STORAGES
from weighbridge_fit.torch_checkpoint.reader import (
    LEGACY_START,
    looks_like_checkpoint,
    read_checkpoint,
    read_torch_checkpoint,
)

from services.fit.fuzz.corpus import (
    archive,
    checkpoint,
    checkpoint_seeds,
    p_call,
    p_dict,
    p_global,
    p_int,
    p_ints,
    p_storage,
    p_tensor,
    p_text,
    p_tuple,
    pickled,
)
from services.fit.fuzz.guard import ForbiddenError, nothing_executed

MIB = 1 << 20
WEIGHT = p_storage("0", "FloatStorage", 12)


def facts_of(tmp_path: Path, content: bytes) -> FileFacts:
    path = tmp_path / "model.ckpt"
    path.write_bytes(content)
    return read_torch_checkpoint(path)


def rows(facts: FileFacts) -> dict[str, tuple[str, tuple[int, ...], int]]:
    return {tensor.name: (tensor.dtype, tensor.shape, tensor.bytes) for tensor in facts.tensors}


def refusal(tmp_path: Path, content: bytes) -> WeightError:
    with pytest.raises(WeightError) as caught:
        facts_of(tmp_path, content)
    assert caught.value.file == "model.ckpt"
    assert len(caught.value.sentence()) < 400
    return caught.value


# What torch says


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def official(torch: Any, loaded: Any, name: str = "") -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of what torch loaded."""
    if isinstance(loaded, torch.Tensor):
        return {name: (str(loaded.dtype).removeprefix("torch."), tuple(loaded.shape))}
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    if isinstance(loaded, list | tuple):
        loaded = dict(enumerate(loaded))
    for key, value in loaded.items() if isinstance(loaded, dict) else ():
        found |= official(torch, value, f"{name}.{key}" if name else str(key))
    return found


def storage_bytes(torch: Any, loaded: Any, seen: dict[int, int]) -> int:
    """Bytes of all storages, each once, by their address in the map."""
    if isinstance(loaded, torch.Tensor):
        storage = loaded.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    for value in loaded.values() if isinstance(loaded, dict) else loaded if isinstance(loaded, list | tuple) else ():
        storage_bytes(torch, value, seen)
    return sum(seen.values())


DTYPES_TO_SAVE = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2",
]  # fmt: skip


def test_agrees_with_torch_on_every_tensor_and_on_what_they_share(torch: Any, tmp_path: Path) -> None:
    base = torch.zeros(30, 7)
    state = OrderedDict(
        {
            "model.diffusion_model.w": base,
            "model.diffusion_model.tied": base,
            "first": base[:10],
            "columns": base[:, 2:5],
            "turned": base.t(),
            "expanded": torch.zeros(1, 5).expand(1000, 5),
            "scalar": torch.tensor(3.0),
            "none": torch.zeros(0, 4),
            "parameter": torch.nn.Parameter(torch.zeros(5)),
            "slice of more": torch.zeros(1000)[990:],
            **{f"of.{name}": torch.zeros(3, 2).to(getattr(torch, name)) for name in DTYPES_TO_SAVE[:-1]},
            "of.float4_e2m1fn_x2": torch.zeros(3, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        }
    )
    root = {"state_dict": state, "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(9)}}}], "epoch": 3}
    path = tmp_path / "model.ckpt"
    torch.save(root, path)
    facts = read_torch_checkpoint(path)
    loaded = torch.load(path, mmap=True, weights_only=True)
    expected = official(torch, loaded.pop("state_dict")) | official(torch, loaded)
    known = {name: DTYPES[dtype].name for name, (dtype, _) in expected.items()}
    assert {name: (row[0], row[1]) for name, row in rows(facts).items()} == {
        name: (known[name], shape) for name, (_, shape) in expected.items()
    }
    again = torch.load(path, mmap=True, weights_only=True)
    assert sum(tensor.bytes for tensor in facts.tensors) == storage_bytes(torch, again, {})
    assert rows(facts)["slice of more"][2] == 4000, "a slice keeps its whole storage"
    assert sum(rows(facts)[name][2] for name in ("model.diffusion_model.tied", "first", "columns", "turned")) == 0
    assert facts.metadata == {"torch.archive": "checkpoint", "torch.inert_names": []}
    assert facts.header_bytes + sum(tensor.bytes for tensor in facts.tensors) < facts.file_bytes


def test_all_widths_are_torch_s(torch: Any) -> None:
    for name, element in DTYPES.items():
        assert getattr(torch, name).itemsize == element.width, name
    official_types = {kind.__name__ for kind in torch._storage_classes}
    assert set(STORAGES) == official_types
    for dtype, storage in torch.storage._dtype_to_storage_type_map().items():
        assert STORAGES[storage] == DTYPES[str(dtype).removeprefix("torch.")]


@pytest.mark.filterwarnings("ignore")
def test_quantised_and_sparse_tensors_keep_every_byte(torch: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    dense = torch.zeros(8, 8)
    packed = torch.quantize_per_channel(dense, torch.ones(8), torch.zeros(8), 0, torch.quint4x2)
    torch.save(
        {"q": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8), "p": packed, "s": torch.eye(8).to_sparse()}, path
    )
    found = rows(read_torch_checkpoint(path))
    assert found["q"] == ("QI8", (8, 8), 64)
    assert found["p"] == ("QU4X2", (8, 8), 32)
    assert (found["s.indices"], found["s.values"]) == (("I64", (2, 8), 128), ("F32", (8,), 32))
    with zipfile.ZipFile(path) as records:
        stored = sum(info.file_size for info in records.infolist() if info.filename.startswith("model/data/"))
    assert sum(size for _, _, size in found.values()) == stored, "scales and zero points are in the file too"


def test_a_pickled_module_has_the_names_of_its_state_dict(torch: Any, tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    path = tmp_path / "model.pth"
    torch.save(module, path)
    facts = read_torch_checkpoint(path)
    assert set(rows(facts)) == set(module.state_dict())
    assert "torch.nn.modules.container.Sequential" in facts.metadata["torch.inert_names"]


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_archive_is_read_without_its_code(torch: Any, tmp_path: Path) -> None:
    class Scaled(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 2)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.inner(x)

    path = tmp_path / "model.pt"
    torch.jit.save(torch.jit.trace(Scaled(), torch.zeros(1, 3)), str(path))
    with nothing_executed():
        facts = read_torch_checkpoint(path)
    assert rows(facts) == {"inner.weight": ("F32", (2, 3), 24), "inner.bias": ("F32", (2,), 8)}
    assert facts.metadata["torch.archive"] == "torchscript"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_torch_can_write_is_read(torch: Any, tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.zeros(3), "long": 2**70, "bytes": b"abc", "set": {1}}, path, pickle_protocol=protocol)
    assert rows(read_torch_checkpoint(path)) == {"w": ("F32", (3,), 12)}


def test_torch_is_not_imported_to_read_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(checkpoint_seeds()[0])
    program = (
        "import sys; from pathlib import Path;"
        "from weighbridge_fit.torch_checkpoint.reader import read_torch_checkpoint;"
        "read_torch_checkpoint(Path(sys.argv[1])); assert not {'torch', 'pickle'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)


# Names and bytes


def test_names_leave_out_the_wrapper_and_keep_the_rest(tmp_path: Path) -> None:
    def weight(key: str) -> bytes:
        return p_tensor(p_storage(key, "FloatStorage", 1), [1])

    for wrapper in ("state_dict", "model"):
        root = p_dict({wrapper: p_dict({"a.b": weight("0")}), "ema": p_dict({"a.b": weight("1")}), "x": weight("2")})
        facts = facts_of(tmp_path, checkpoint(root, {"0": 4, "1": 4, "2": 4}))
        assert [tensor.name for tensor in facts.tensors] == ["a.b", "ema.a.b", "x"]


def test_a_name_that_stands_beside_the_weights_keeps_both_whole(tmp_path: Path) -> None:
    weight, other = (p_tensor(p_storage(key, "FloatStorage", 1), [1]) for key in "01")
    root = p_dict({"model": p_dict({"head": weight}), "head": other})
    assert set(rows(facts_of(tmp_path, checkpoint(root, {"0": 4, "1": 4})))) == {"model.head", "head"}


def test_a_lone_tensor_and_a_list_have_names(tmp_path: Path) -> None:
    tensor = p_tensor(WEIGHT, [4, 3])
    assert set(rows(facts_of(tmp_path, checkpoint(tensor, {"0": 48})))) == {"tensor"}
    assert set(rows(facts_of(tmp_path, checkpoint(b"](" + tensor + tensor + b"e", {"0": 48})))) == {"0", "1"}


def test_each_byte_of_a_storage_counts_for_the_first_tensor_that_covers_it(tmp_path: Path) -> None:
    views = {
        "middle": p_tensor(WEIGHT, [4], at=4),  # bytes 16 to 32
        "again": p_tensor(WEIGHT, [4], at=4),
        "overlapping": p_tensor(WEIGHT, [4], at=6),  # bytes 24 to 40: 8 of them are taken
    }
    found = rows(facts_of(tmp_path, checkpoint(p_dict(views), {"0": 48})))
    # 16 bytes in front and 8 behind belong to nobody: to the first, and to the last before them.
    assert {name: row[2] for name, row in found.items()} == {"middle": 16 + 16, "again": 0, "overlapping": 8 + 8}


def test_an_empty_tensor_may_claim_to_lie_beyond_its_storage_and_takes_nothing(tmp_path: Path) -> None:
    """Found by fuzzing: the bytes between the storage's end and its place were counted, with a minus."""
    views = {"far": p_tensor(WEIGHT, [0], at=100), "real": p_tensor(WEIGHT, [12])}
    found = rows(facts_of(tmp_path, checkpoint(p_dict(views), {"0": 48})))
    assert found == {"far": ("F32", (0,), 0), "real": ("F32", (12,), 48)}


def test_a_record_larger_than_its_storage_counts_whole(tmp_path: Path) -> None:
    assert rows(facts_of(tmp_path, checkpoint(p_tensor(WEIGHT, [4]), {"0": 64})))["tensor"][2] == 64


def test_objects_of_unknown_classes_are_inert_and_named(tmp_path: Path) -> None:
    scalar = p_call("numpy.core.multiarray", "scalar", p_call("numpy", "dtype", p_text("f8")), b"C\x08" + bytes(8))
    callback = p_global("pytorch_lightning.callbacks", "ModelCheckpoint") + b")\x81" + p_dict({"best": scalar}) + b"b"
    root = p_dict({"state_dict": p_dict({"w": p_tensor(WEIGHT, [12])}), "callbacks": callback})
    facts = facts_of(tmp_path, checkpoint(root, {"0": 48}))
    assert rows(facts) == {"w": ("F32", (12,), 48)}
    assert facts.metadata["torch.inert_names"] == [
        "numpy.core.multiarray.scalar", "numpy.dtype", "pytorch_lightning.callbacks.ModelCheckpoint",
    ]  # fmt: skip


def test_facts_say_what_a_careless_loader_would_run(tmp_path: Path) -> None:
    system = p_call("posix", "system", p_text("true"))
    weights = p_dict({"w": p_tensor(WEIGHT, [12])})
    path = tmp_path / "model.ckpt"
    path.write_bytes(checkpoint(p_dict({"state_dict": weights, "extra": system}), {"0": 48}))
    (note,) = describe(path, lambda found: found).notes
    assert "model.ckpt calls 'posix.system' when it is unpickled" in note
    calls = {name: p_call("m\x1b[2J", name, p_text("")) for name in "abcde"}
    path.write_bytes(checkpoint(p_dict({"state_dict": weights, **calls}), {"0": 48}))
    (note,) = describe(path, lambda found: found).notes
    assert note.isprintable() and "and 2 more" in note
    path.write_bytes(checkpoint(weights, {"0": 48}))
    assert describe(path, lambda found: found).notes == ()


def test_values_that_hold_one_another_are_walked_once(tmp_path: Path) -> None:
    tensor = p_tensor(WEIGHT, [12])
    ring = b"]q\x00(" + tensor + b"h\x00e"
    assert set(rows(facts_of(tmp_path, checkpoint(ring, {"0": 48})))) == {"0"}
    # Each list holds the one before it twice: 2^60 ways to the tensor.
    twice = [b"](h%ch%ceq%c0" % (number, number, number + 1) for number in range(60)]
    laughs = b"]" + tensor + b"aq\x000" + b"".join(twice) + b"h\x3c"
    assert len(rows(facts_of(tmp_path, checkpoint(laughs, {"0": 48})))) == 1


def test_a_large_archive_has_zip64_records(tmp_path: Path) -> None:
    """torch writes the 64-bit end always, and 64-bit sizes from 4 GiB on; here a sparse file of 5 GiB has both."""
    path = tmp_path / "model.ckpt"
    size = 5 << 30
    head = checkpoint(p_tensor(p_storage("0", "ByteStorage", size), [size]), {})
    with zipfile.ZipFile(path, "w") as target, zipfile.ZipFile(BytesIO(head)) as source:
        target.writestr("archive/data.pkl", source.read("archive/data.pkl"))
    raw = path.read_bytes()
    central, end = raw.index(b"PK\x01\x02"), raw.index(b"PK\x05\x06")
    name = b"archive/data/0"
    record = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), 20)
    sizes = struct.pack("<HHQQ", 1, 16, size, size)
    fields = (45, 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), 20, 0, 0, 0, 0, central)
    entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", *fields)
    directory = raw[central:end] + entry + name + sizes
    offset = central + len(record + name + sizes) + size
    wide = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 2, 2, len(directory), offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + len(directory), 1)
    narrow = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 2, 2, len(directory), 0xFFFFFFFF, 0)
    with path.open("r+b") as file:
        file.seek(central)
        file.write(record + name + sizes)
        try:
            file.seek(offset)
            file.write(directory + wide + locator + narrow)
        except OSError:
            pytest.skip("this file system has no files of that size")
    assert rows(read_torch_checkpoint(path)) == {"tensor": ("U8", (size,), size)}
    with zipfile.ZipFile(path) as check:
        assert check.getinfo("archive/data/0").file_size == size, "Python's own reader agrees"


# Nothing is executed


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def evil_pickles(marker: str) -> dict[str, bytes]:
    """Pickles that Python's own reader would run; each leaves a file, imports or calls something."""
    command = f"touch {marker}"
    stage = pickle.dumps(Evil(os.system, command), 2)
    code = f"open({marker!r}, 'w')"
    return {
        "os.system": stage,
        "os.system, protocol 4": pickle.dumps(Evil(os.system, command), 4),
        "subprocess": pickle.dumps(Evil(subprocess.call, ["touch", marker]), 4),
        "eval": pickle.dumps(Evil(eval, code), 2),
        "exec": pickle.dumps(Evil(exec, code), 4),
        "compile": pickle.dumps(Evil(compile, code, "x", "exec"), 2),
        "__import__": pickle.dumps(Evil(__import__, "antigravity"), 2),
        "getattr chain": pickle.dumps(Evil(getattr, Evil(__import__, "os"), "system"), 2),
        "runpy": pickled(p_call("runpy", "_run_code", p_text(code), b"}")),
        "attrgetter": pickled(p_call("operator", "attrgetter", p_text("system")) + p_tuple(p_text("os")) + b"R"),
        "__setstate__": pickled(p_global("weighbridge_fit.model", "Model") + b")\x81" + p_dict({"x": p_int(1)}) + b"b"),
        "name by memo": pickled(p_global("os", "system") + b"q\x000" + b"h\x00" + p_tuple(p_text(command)) + b"R"),
        "name by duplicate": pickled(p_global("os", "system") + b"2" + p_tuple(p_text(command)) + b"R0"),
        "name from strings": pickled(p_text("os") + p_text("system") + b"\x93" + p_tuple(p_text(command)) + b"R", 4),
        "name from a call": pickled(p_call("builtins", "str", p_text("os")) + p_text("system") + b"\x93", 4),
        "dotted name": pickled(p_text("os") + p_text("path.os.system") + b"\x93" + p_tuple(p_text(command)) + b"R", 4),
        "nested pickle": pickled(p_call("pickle", "loads", b"C" + bytes([len(stage)]) + stage)),
        "torch.load": pickled(p_call("torch", "load", p_text(marker))),
        "torch hub": pickled(p_call("torch.hub", "load", p_text("a/b"), p_text("c"))),
        "rebuild through a type": pickled(
            p_call("torch._tensor", "_rebuild_from_type_v2", p_global("os", "system"), p_global("os", "x"),
                   p_tuple(p_text(command)), b"}")
        ),
        "newobj of a function": pickled(p_global("os", "system") + p_tuple(p_text(command)) + b"\x81"),
        "newobj_ex": pickled(p_global("os", "system") + p_tuple(p_text(command)) + b"}\x92", 4),
        "extension registry": pickled(b"\x82\x01"),
        "extension registry, 2 bytes": pickled(b"\x83\x01\x00"),
        "extension registry, 4 bytes": pickled(b"\x84\x01\x00\x00\x00"),
        "instance": pickled(b"(" + p_text(command) + b"ios\nsystem\n"),
        "object": pickled(b"(" + p_global("os", "system") + p_text(command) + b"o"),
        "persistent id in text": pickled(b"Pos.system\n"),
        "persistent id, a text": pickled(p_text("storage") + b"Q"),
        "persistent id, a number": pickled(p_int(1) + b"Q"),
        "persistent id, a module": pickled(
            p_tuple(p_text("module"), p_global("os", "system"), p_text(marker), p_text(code)) + b"Q"
        ),
        "persistent id, a storage of a class of theirs": pickled(p_storage("0", "system", 1, module="os")),
        "buffer": pickled(b"\x97\x98", 5),
        "__reduce__ state": pickled(
            p_global("collections", "OrderedDict") + b")R" + p_dict({"__class__": p_global("os", "system")}) + b"b"
        ),
    }  # fmt: skip


EVIL = list(evil_pickles("x"))


@pytest.mark.parametrize("name", EVIL)
def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    evil = evil_pickles(str(marker))[name]
    # As the pickle itself, and beside weights that are worth reading.
    beside = pickled(p_dict({"w": p_tensor(WEIGHT, [12]), "x": evil.removeprefix(evil[:2])[:-1]}))
    for pickle_bytes in (evil, beside):
        path = tmp_path / "model.ckpt"
        path.write_bytes(archive({"data.pkl": pickle_bytes, "data/0": bytes(48), "version": b"3\n"}))
        loaded = set(sys.modules)
        try:
            with nothing_executed():
                facts = read_torch_checkpoint(path)
        except WeightError as error:
            assert error.reason in (WeightReason.PICKLE_INVALID, WeightReason.UNSUPPORTED_TENSOR)
        else:
            assert set(rows(facts)) <= {"w"}
        assert not marker.exists()
        assert set(sys.modules) == loaded


def test_the_guard_would_have_seen_it(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for evil in ("os.system", "eval", "subprocess", "exec"):
        with pytest.raises(ForbiddenError), nothing_executed():
            pickle.loads(evil_pickles(str(marker))[evil])
    assert not marker.exists()


def test_a_tensor_that_only_their_code_could_make_is_refused_by_name(tmp_path: Path) -> None:
    root = p_dict({"w": p_call("vendor.tensors", "rebuild_packed", WEIGHT, p_ints([12]))})
    error = refusal(tmp_path, checkpoint(root, {"0": 48}))
    assert error.reason is WeightReason.UNSUPPORTED_TENSOR
    assert "vendor.tensors.rebuild_packed" in error.message


# Malformed


def tensor_of(shape: list[int], strides: list[int] | None = None, at: int = 0, elements: int = 12) -> bytes:
    return checkpoint(p_tensor(p_storage("0", "FloatStorage", elements), shape, at, strides), {"0": 48})


def changed(content: bytes, old: bytes, new: bytes) -> bytes:
    assert old in content
    return content.replace(old, new)


def end_of(content: bytes) -> int:
    return content.rindex(b"PK\x05\x06")


PLAIN = checkpoint(p_dict({"w": p_tensor(WEIGHT, [12])}), {"0": 48})
END = end_of(PLAIN)
CENTRAL = PLAIN.index(b"PK\x01\x02")
RAW = pickled(p_dict({"w": p_tensor(WEIGHT, [12])}))
DUPLICATED = PLAIN.replace(b"archive/version", b"archive/data/0x").replace(b"archive/data/0x", b"archive/byteord")

MALFORMED: list[tuple[str, bytes, WeightReason]] = [
    ("empty file", b"", WeightReason.BAD_MAGIC),
    ("another file", b"NOPE" + bytes(60), WeightReason.BAD_MAGIC),
    ("a zip of nothing", archive({}), WeightReason.BAD_MAGIC),
    ("a zip of something else", archive({"word/document.xml": b"<x/>"}), WeightReason.UNKNOWN_FORMAT),
    ("data.pkl in another folder", archive({"x/data.pkl": RAW}), WeightReason.UNKNOWN_FORMAT),
    ("cut before its end", PLAIN[:-1], WeightReason.TRUNCATED),
    ("cut in the middle", PLAIN[: len(PLAIN) // 2], WeightReason.TRUNCATED),
    ("bytes behind its end", PLAIN + b"x", WeightReason.TRUNCATED),
    ("bytes in front", b"PK\x03\x04" + PLAIN, WeightReason.ARCHIVE_INVALID),
    ("more records than its directory holds", PLAIN[: END + 8] + b"\xff\xff\xff\xff" + PLAIN[END + 12 :],
     WeightReason.COUNT_EXCEEDS_FILE),
    ("fewer records than its directory holds", PLAIN[: END + 8] + b"\x01\0\x01\0" + PLAIN[END + 12 :],
     WeightReason.ARCHIVE_INVALID),
    ("two parts", PLAIN[: END + 4] + b"\x01\0" + PLAIN[END + 6 :], WeightReason.ARCHIVE_INVALID),
    ("directory of 4 GiB", PLAIN[: END + 12] + b"\xfe\xff\xff\xff" + PLAIN[END + 16 :], WeightReason.ARCHIVE_INVALID),
    ("encrypted", PLAIN[: CENTRAL + 8] + b"\x01\0" + PLAIN[CENTRAL + 10 :], WeightReason.ARCHIVE_INVALID),
    ("name beyond the directory", PLAIN[: CENTRAL + 28] + b"\xff\xff" + PLAIN[CENTRAL + 30 :],
     WeightReason.ARCHIVE_INVALID),
    ("a record beyond the file", PLAIN[: CENTRAL + 42] + b"\0\0\0\x70" + PLAIN[CENTRAL + 46 :],
     WeightReason.BAD_OFFSETS),
    ("stored but of another size", PLAIN[: CENTRAL + 24] + b"\0\0\0\x01" + PLAIN[CENTRAL + 28 :],
     WeightReason.SIZE_MISMATCH),
    ("the same name twice", changed(PLAIN, b"archive/version", b"archive/data/0\0").replace(b"data/0\0", b"data/0"),
     WeightReason.ARCHIVE_INVALID),
    ("local header elsewhere", b"PK\x03\x04" + b"\xff" * 30 + PLAIN[34:], WeightReason.ARCHIVE_INVALID),
    ("a packed storage", archive({"data.pkl": RAW, "data/0": bytes(48)}, packed=["data/0"]),
     WeightReason.ARCHIVE_INVALID),
    ("no record for the storage", archive({"data.pkl": RAW}), WeightReason.ARCHIVE_INVALID),
    ("a storage smaller than it claims", archive({"data.pkl": RAW, "data/0": bytes(47)}), WeightReason.SIZE_MISMATCH),
    ("packed bytes that are none", changed(archive({"data.pkl": RAW * 9, "data/0": bytes(48)}, packed=["data.pkl"]),
     zipfile.zlib.compress(RAW * 9, wbits=-15)[:9], b"\xff" * 9), WeightReason.ARCHIVE_INVALID),
    ("a view beyond the storage", tensor_of([13]), WeightReason.BAD_OFFSETS),
    ("an offset beyond the storage", tensor_of([4], at=9), WeightReason.BAD_OFFSETS),
    ("strides beyond the storage", tensor_of([4, 3], strides=[4, 1]), WeightReason.BAD_OFFSETS),
    ("strides that wrap 64 bits", tensor_of([2, 2], strides=[2**62, 2**62]), WeightReason.BAD_OFFSETS),
    ("a negative stride", tensor_of([4], strides=[-1]), WeightReason.BAD_SHAPE),
    ("a negative size", tensor_of([-4], strides=[1]), WeightReason.BAD_SHAPE),
    ("a negative offset", tensor_of([4], at=-1), WeightReason.BAD_SHAPE),
    ("strides of another rank", tensor_of([4, 3], strides=[1]), WeightReason.BAD_SHAPE),
    ("a shape that wraps 64 bits", tensor_of([2**33, 2**33], strides=[0, 0]), WeightReason.BAD_SHAPE),
    ("65 dimensions", tensor_of([1] * 65), WeightReason.BAD_SHAPE),
    ("a negative storage", tensor_of([4], elements=-1), WeightReason.PICKLE_INVALID),
    ("a storage of 2^63", tensor_of([4], elements=2**63), WeightReason.PICKLE_INVALID),
    ("no pickle at all", archive({"data.pkl": b""}), WeightReason.TRUNCATED),
    ("a pickle without end", archive({"data.pkl": b"\x80\x02}"}), WeightReason.TRUNCATED),
    ("a pickle of nothing", archive({"data.pkl": b"."}), WeightReason.PICKLE_INVALID),
    ("two values", archive({"data.pkl": b"NN."}), WeightReason.PICKLE_INVALID),
    ("a text beyond the end", archive({"data.pkl": b"X\xff\xff\xff\x7f."}), WeightReason.TRUNCATED),
    ("a text of 2^63", archive({"data.pkl": b"\x8d" + b"\xff" * 8}), WeightReason.TRUNCATED),
    ("a number of -1 bytes", archive({"data.pkl": b"\x8b\xff\xff\xff\xff."}), WeightReason.PICKLE_INVALID),
    ("a name without end", archive({"data.pkl": b"c" + b"a" * 5000}), WeightReason.PICKLE_INVALID),
    ("a value that was never made", archive({"data.pkl": b"h\x07."}), WeightReason.PICKLE_INVALID),
    ("a mark never made", archive({"data.pkl": b"t."}), WeightReason.PICKLE_INVALID),
    ("values taken from below a mark", archive({"data.pkl": b"NN(\x86t."}), WeightReason.PICKLE_INVALID),
    ("a key without a value", archive({"data.pkl": b"}(Nu."}), WeightReason.PICKLE_INVALID),
    ("an item of a number", archive({"data.pkl": b"K\x01NNs."}), WeightReason.PICKLE_INVALID),
    ("appended to a number", archive({"data.pkl": b"K\x01Na."}), WeightReason.PICKLE_INVALID),
    ("called with no arguments", archive({"data.pkl": b"cos\nsystem\nNR."}), WeightReason.PICKLE_INVALID),
    ("an opcode that is none", archive({"data.pkl": b"\xff."}), WeightReason.PICKLE_INVALID),
    ("protocol 6", archive({"data.pkl": b"\x80\x06N."}), WeightReason.PICKLE_INVALID),
    ("nested without end", archive({"data.pkl": b"]q\x00" + b"]" * 100 + b"h\x00a" + b"a" * 100 + b"."}),
     WeightReason.TOO_DEEP),
    ("the same key twice in a dict", checkpoint(b"}(" + (p_text("w") + p_tensor(WEIGHT, [12])) * 2 + b"u", {"0": 48}),
     WeightReason.DUPLICATE_KEY),
]  # fmt: skip


@pytest.mark.parametrize(("content", "reason"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_malformed_files_are_errors_with_a_reason(tmp_path: Path, content: bytes, reason: WeightReason) -> None:
    assert refusal(tmp_path, content).reason is reason


def test_records_with_the_same_name_or_the_same_bytes_are_refused(tmp_path: Path) -> None:
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as target, pytest.warns(UserWarning, match="Duplicate"):
        for content in (RAW, b"other"):
            target.writestr("archive/data.pkl", content)
    assert refusal(tmp_path, file.getvalue()).reason is WeightReason.DUPLICATE_KEY
    # The second entry of the directory points where the first does.
    second = PLAIN.index(b"PK\x01\x02", CENTRAL + 4)
    overlapping = PLAIN[: second + 42] + PLAIN[CENTRAL + 42 : CENTRAL + 46] + PLAIN[second + 46 :]
    assert refusal(tmp_path, overlapping).reason is WeightReason.BAD_OFFSETS


EXHAUSTING = {
    "dicts": b"}" * MIB,
    "lists": b"]" * MIB,
    "lists in a list": b"](" + b"]" * MIB + b"e.",
    "marks": b"(" * MIB,
    "tuples": b"N\x85" * MIB,
    "tuples in tuples": b"N" + b"\x85" * MIB,
    "duplicates": b"N" + b"2" * MIB + b"\x94" * MIB,
    "memo": b"N" + b"\x94" * MIB,
    "memo with odd numbers": b"N" + b"".join(b"r" + struct.pack("<I", 7 * n + 1) for n in range(1 << 18)),
    "numbers": b"](" + b"K\x01" * MIB + b"e.",
    "pairs": b"}(" + b"M\x01\x01" * MIB + b"u.",
    "nones": b"](" + b"N" * MIB + b"e" + b"(]" * MIB,
    "texts": b"]" + (b"X\x00\x10\0\0" + b"\xc3\xa4" * 2048) * 4096,
    "long numbers": b"](" + (b"\x8a\xff" + b"\x7f" * 255) * (64 << 10) + b"e.",
    "names": b"](" + b"cx\ny\n" * MIB + b"e.",
    "calls": b"](" + b"cx\ny\n)R" * MIB + b"e.",
    "dicts of dicts": b"(" + b"ccollections\nOrderedDict\n" + b"q\x00" + b"h\x00)R" * MIB + b"t.",
    "storages": b"(" + WEIGHT + (WEIGHT[:-1] + b"Q") * (1 << 16) + b"t.",
    "one text of 96 MiB": b"X\0\0\0\x06" + bytes(96 * MIB) + b".",
}


@pytest.mark.parametrize("name", EXHAUSTING)
def test_pickles_made_to_exhaust_stay_within_the_memory_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # A sixteenth of what is allowed, so that the test is quick: the rest is in proportion.
    monkeypatch.setattr(stack, "MAX_VALUE_BYTES", stack.MAX_VALUE_BYTES // 16)
    monkeypatch.setattr(contents, "MAX_CONTAINERS", contents.MAX_CONTAINERS // 16)
    path = tmp_path / "model.ckpt"
    for packed in (["data.pkl"], []):
        path.write_bytes(archive({"data.pkl": EXHAUSTING[name], "data/0": bytes(48)}, packed=packed))
        assert peak_of(path) <= 96 * MIB // 16
        if len(EXHAUSTING[name]) > MIB * 8:
            break


def test_the_largest_pickles_stay_within_the_memory_budget(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(archive({"data.pkl": b"](" + b"]" * 131_000 + b"(" + b"]\x85" * 380_000 + b"tee."}))
    assert peak_of(path) <= 96 * MIB


def peak_of(path: Path) -> int:
    tracemalloc.start()
    try:
        read_torch_checkpoint_untimed(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_one_long_tuple_of_arguments_is_not_looked_through_at_each_call(tmp_path: Path) -> None:
    # Ten thousand calls with a hundred thousand arguments each would be a billion looks.
    calls = b"(" + b"N" * 100_000 + b"tq\x000" + b"cx\ny\nh\x00R0" * 10_000 + b"N."
    assert not facts_of(tmp_path, archive({"data.pkl": calls})).tensors


def read_torch_checkpoint_untimed(path: Path) -> None:
    """Reads with a clock that stands still, so that memory is what is tested."""
    with open_regular(path) as file:
        try:
            read_checkpoint(file, "x", "", ParseBudget(clock=lambda: 0.0))
        except WeightError as error:
            assert error.reason in (WeightReason.HEADER_TOO_LARGE, WeightReason.PICKLE_INVALID, WeightReason.TRUNCATED)


def test_time_ends_a_pickle_that_takes_too_long(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(archive({"data.pkl": b"N0" * 100_000 + b"N."}))
    ticks = iter(range(10_000))
    with open_regular(path) as file, pytest.raises(WeightError) as caught:
        read_checkpoint(file, "x", "", ParseBudget(clock=lambda: next(ticks)))
    assert caught.value.reason is WeightReason.PARSE_BUDGET


def test_a_bomb_costs_what_is_asked_of_it(tmp_path: Path) -> None:
    """A packed pickle that claims more than may be read is not unpacked at all."""
    bomb = archive({"data.pkl": bytes(101 * MIB)}, packed=["data.pkl"])
    assert refusal(tmp_path, bomb).reason is WeightReason.HEADER_TOO_LARGE


# Legacy files


def test_files_are_recognised_by_how_they_begin() -> None:
    assert pickle.dumps(0x1950A86A20F9469CFC6C, 2) == LEGACY_START
    assert looks_like_checkpoint(PLAIN[:15])
    assert looks_like_checkpoint(LEGACY_START)
    assert not looks_like_checkpoint(b"GGUF" + bytes(20))


def test_a_legacy_file_agrees_with_torch(torch: Any, tmp_path: Path) -> None:
    base = torch.zeros(30, 7)
    root = {"state_dict": {"a": base, "tied": base, "half": torch.zeros(4).half(), "cut": torch.zeros(90)[80:]}, "n": 1}
    path = tmp_path / "old.pth"
    torch.save(root, path, _use_new_zipfile_serialization=False)
    assert path.read_bytes().startswith(LEGACY_START)
    facts = read_torch_checkpoint(path)
    assert rows(facts) == {
        "a": ("F32", (30, 7), 840), "tied": ("F32", (30, 7), 0), "half": ("F16", (4,), 8), "cut": ("F32", (10,), 360),
    }  # fmt: skip
    assert facts.metadata["torch.archive"] == "legacy"
    assert facts.header_bytes + 840 + 8 + 360 == facts.file_bytes
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightError) as caught:
        read_torch_checkpoint(path)
    assert caught.value.reason is WeightReason.TRUNCATED


def test_a_legacy_file_executes_nothing(torch: Any, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / "old.pth"
    stages = [pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2), pickle.dumps({}, 2)]
    path.write_bytes(b"".join(stages) + evil_pickles(str(marker))["os.system"] + pickle.dumps([], 2))
    with pytest.raises(WeightError) as caught:
        read_torch_checkpoint(path)
    assert caught.value.reason is WeightReason.LEGACY_CHECKPOINT
    assert "convert it to safetensors" in caught.value.message
    assert not marker.exists()


def test_without_torch_a_legacy_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy.importlib.util, "find_spec", lambda name: None)
    error = refusal(tmp_path, LEGACY_START + bytes(100))
    assert error.reason is WeightReason.LEGACY_CHECKPOINT
    assert "weighbridge-fit[torch]" in error.message
    assert "safetensors" in error.message


def test_a_legacy_file_that_takes_too_long_is_given_up(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legacy, "WALL_SECONDS", 0.0)
    assert refusal(tmp_path, LEGACY_START + bytes(100)).reason is WeightReason.PARSE_BUDGET
