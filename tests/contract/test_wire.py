"""The protocol of router and shards: its number, its names, and stubs as fresh as the proto."""

from __future__ import annotations

import hashlib
import importlib.resources
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

from wire.lora.v1 import lora_pb2
from wire.node.v1 import node_pb2
from wire.pooling.v1 import pooling_pb2
from wire.protocol import PROTOCOL
from wire.v3 import generate_pb2 as pb

FILE: FileDescriptor = pb.DESCRIPTOR
PROTO_DIR = Path(__file__).parents[2] / "proto"

RPCS = ("Info", "ServiceDiscovery", "ClearCache", "FilterBatch", "Warmup", "Prefill", "Decode", "Health")

# A changed message means the next PROTOCOL, and the new file's sum here: router and shards of different releases then
# refuse each other at the start instead of misreading each other later.
SUMS = {
    1: "6ce59d5b73e41daf",
    2: "ebca00ca4eae3a59",
    3: "353e05a6879d656d",
    4: "68e5ac2e779ef3d6",
    5: "8cfb1eae813ab698",
    6: "c0e8da2aad17c96e",
}


def test_a_changed_protocol_has_a_new_number():
    file = descriptor_pb2.FileDescriptorProto()
    FILE.CopyToProto(file)
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")
    found = hashlib.sha256(file.SerializeToString(deterministic=True)).hexdigest()[:16]
    assert found == SUMS[PROTOCOL], "a changed proto/v3/generate.proto needs a new PROTOCOL, and its sum here"


def test_repeated_numbers_are_packed():
    for name in FILE.message_types_by_name:
        for field in FILE.message_types_by_name[name].fields:
            numeric = field.cpp_type not in (field.CPPTYPE_STRING, field.CPPTYPE_MESSAGE)
            assert field.is_packed == (field.is_repeated and numeric), f"{name}.{field.name}"


def test_the_service():
    assert FILE.package == "generate.v3"
    service = FILE.services_by_name["TextGenerationService"]
    assert {m.name for m in service.methods} == set(RPCS)
    for method in service.methods:
        assert (method.input_type.name, method.output_type.name) == (f"{method.name}Request", f"{method.name}Response")
        assert not method.client_streaming
        assert not method.server_streaming


@pytest.mark.parametrize(
    ("path", "stubs"),
    [
        ("v3/generate.proto", FILE),
        ("node/v1/node.proto", node_pb2.DESCRIPTOR),
        ("lora/v1/lora.proto", lora_pb2.DESCRIPTOR),
        ("pooling/v1/pooling.proto", pooling_pb2.DESCRIPTOR),
    ],
)
def test_the_stubs_are_as_fresh_as_the_proto(tmp_path, path, stubs):
    output = tmp_path / "set.bin"
    # The well-known way to compile under a mapped folder, with whatever version of the compiler is installed.
    subprocess.run(
        [
            sys.executable, "-m", "grpc_tools.protoc", f"-Iwire={PROTO_DIR}",
            f"-I{importlib.resources.files('grpc_tools') / '_proto'}", f"--descriptor_set_out={output}",
            f"wire/{path}",
        ],
        check=True,
        timeout=60,
    )  # fmt: skip
    (compiled,) = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto()
    stubs.CopyToProto(committed)
    # json_name is filled in by some versions of the compiler and not by others; it is derived from the name.
    for file in (compiled, committed):
        maps = [nested for message in file.message_type for nested in message.nested_type]
        for message in (*file.message_type, *maps):
            for field in message.field:
                field.ClearField("json_name")
    assert compiled == committed
