"""The .proto files, the code made of them and the baseline that guards them stay together."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

REPOSITORY = Path(__file__).resolve().parents[2]
PROTO = REPOSITORY / "proto"
BUF = Path(sys.executable).with_name("buf")

FILES = sorted(str(path.relative_to(PROTO)) for path in (PROTO / "weighbridge").rglob("*.proto"))

MAY_IMPORT = ("weighbridge/", "google/protobuf/")
"""Nothing else can be found where buf's registry cannot be reached."""

SERVICE_PATH, METHOD_PATH = 6, 2
"""Field numbers of FileDescriptorProto.service and ServiceDescriptorProto.method, as a comment's path names them."""

INT64_KINDS = (
    descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
)


def buf(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run buf in proto/ and return what it did."""
    return subprocess.run([BUF, *arguments], cwd=PROTO, capture_output=True, check=False)


@pytest.fixture(scope="module")
def image() -> descriptor_pb2.FileDescriptorSet:
    """The .proto files as they are on disk, comments included."""
    built = buf("build", "--as-file-descriptor-set", "-o", "-#format=binpb")
    assert built.returncode == 0, built.stderr.decode()
    return descriptor_pb2.FileDescriptorSet.FromString(built.stdout)


def own(image: descriptor_pb2.FileDescriptorSet) -> list[descriptor_pb2.FileDescriptorProto]:
    return [file for file in image.file if file.name.startswith("weighbridge/")]


def without_comments_and_names(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    """What both compilers agree to write down: buf adds JSON names and comments, protoc leaves them out."""
    bare = descriptor_pb2.FileDescriptorProto()
    bare.CopyFrom(file)
    bare.ClearField("source_code_info")
    for _, message in messages(bare):
        for field in [*message.field, *message.extension]:
            field.ClearField("json_name")
    return bare


def messages(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[str, descriptor_pb2.DescriptorProto]]:
    """Every message of a file with its full name, nested ones too."""
    waiting = [(f"{file.package}.{message.name}", message) for message in file.message_type]
    while waiting:
        name, message = waiting.pop()
        yield name, message
        waiting += [(f"{name}.{nested.name}", nested) for nested in message.nested_type]


@pytest.mark.parametrize("path", FILES)
def test_generated_code_is_that_of_the_proto_file(image: descriptor_pb2.FileDescriptorSet, path: str) -> None:
    module = importlib.import_module(
        "weighbridge_proto." + path.removeprefix("weighbridge/")[:-6].replace("/", ".") + "_pb2"
    )
    generated = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(generated)
    on_disk = next(file for file in image.file if file.name == path)
    assert without_comments_and_names(generated) == without_comments_and_names(on_disk), "run make proto"


def test_every_rpc_states_its_memory_effect(image: descriptor_pb2.FileDescriptorSet) -> None:
    silent = []
    for file in own(image):
        comments = {tuple(at.path): at.leading_comments for at in file.source_code_info.location}
        for i, service in enumerate(file.service):
            for j, method in enumerate(service.method):
                comment = " ".join(comments.get((SERVICE_PATH, i, METHOD_PATH, j), "").split())
                if "memory effect:" not in comment.lower():
                    silent.append(f"{file.package}.{service.name}/{method.name}")
    assert not silent


def test_byte_counts_are_64_bits_wide(image: descriptor_pb2.FileDescriptorSet) -> None:
    counts = {
        f"{name}.{field.name}": field.type
        for file in own(image)
        for name, message in messages(file)
        for field in message.field
        if field.name.endswith("_bytes")
    }
    assert len(counts) > 20, "the walk found the contracts"
    assert [name for name, kind in counts.items() if kind not in INT64_KINDS] == []


def test_contracts_import_only_what_every_build_can_find(image: descriptor_pb2.FileDescriptorSet) -> None:
    imported = {dependency for file in own(image) for dependency in file.dependency}
    assert [path for path in imported if not path.startswith(MAY_IMPORT)] == []


def test_existing_clients_can_read_what_the_contracts_say_now() -> None:
    compared = buf("breaking", "--against", "baseline.binpb")
    assert compared.returncode == 0, compared.stdout.decode()


def test_the_baseline_notices_a_field_that_went_away(image: descriptor_pb2.FileDescriptorSet, tmp_path: Path) -> None:
    broken = descriptor_pb2.FileDescriptorSet()
    broken.CopyFrom(image)
    leases = next(file for file in broken.file if file.name == "weighbridge/ledger/v1/lease.proto")
    lost = leases.message_type[0].field.pop()
    changed = tmp_path / "changed.binpb"
    changed.write_bytes(broken.SerializeToString())
    compared = buf("breaking", str(changed), "--against", "baseline.binpb", "--error-format", "json")
    found = [json.loads(line) for line in compared.stdout.splitlines()]
    assert compared.returncode != 0
    assert any(lost.name in problem["message"] for problem in found), found
