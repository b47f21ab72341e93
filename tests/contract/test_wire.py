"""The wire contract: field by field as generate.v3 defines it, extensions beside it, stubs as fresh as the proto."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

from wire.lora.v1 import lora_pb2
from wire.node.v1 import node_pb2
from wire.v3 import generate_pb2 as pb

FILE: FileDescriptor = pb.DESCRIPTOR
PROTO_DIR = Path(__file__).parents[2] / "proto"
FIRST_EXTENSION = 100

# Field: number, type, presence; "-" implicit, "opt" explicit, "rep" repeated, "msg" a message (presence by nature),
# "oneof NAME" a member of that oneof.
STOCK = {
    "HealthRequest": {},
    "HealthResponse": {},
    "InfoRequest": {},
    "InfoResponse": {
        "requires_padding": (1, "bool", "-"),
        "dtype": (2, "string", "-"),
        "device_type": (3, "string", "-"),
        "window_size": (4, "uint32", "opt"),
        "speculate": (5, "uint32", "-"),
        "support_chunking": (6, "bool", "-"),
        "use_prefix_caching": (7, "bool", "-"),
        "attention_impl": (8, "string", "-"),
        "block_size": (9, "uint32", "-"),
    },
    "ServiceDiscoveryRequest": {},
    "ServiceDiscoveryResponse": {"urls": (1, "string", "rep")},
    "ClearCacheRequest": {"id": (1, "uint64", "opt")},
    "ClearCacheResponse": {},
    "Image": {"data": (1, "bytes", "-"), "mimetype": (2, "string", "-")},
    "InputChunk": {"text": (1, "string", "oneof chunk"), "image": (2, "Image", "oneof chunk")},
    "Input": {"chunks": (1, "InputChunk", "rep")},
    "NextTokenChooserParameters": {
        "temperature": (1, "float", "-"),
        "top_k": (2, "uint32", "-"),
        "top_p": (3, "float", "-"),
        "typical_p": (4, "float", "-"),
        "do_sample": (5, "bool", "-"),
        "seed": (6, "uint64", "-"),
        "repetition_penalty": (7, "float", "-"),
        "watermark": (8, "bool", "-"),
        "frequency_penalty": (9, "float", "-"),
        "grammar": (10, "string", "-"),
        "grammar_type": (11, "GrammarType", "-"),
    },
    "StoppingCriteriaParameters": {
        "max_new_tokens": (1, "uint32", "-"),
        "stop_sequences": (2, "string", "rep"),
        "ignore_eos_token": (3, "bool", "-"),
    },
    "Request": {
        "id": (1, "uint64", "-"),
        "inputs": (2, "string", "-"),
        "truncate": (3, "uint32", "-"),
        "parameters": (4, "NextTokenChooserParameters", "msg"),
        "stopping_parameters": (5, "StoppingCriteriaParameters", "msg"),
        "prefill_logprobs": (6, "bool", "-"),
        "top_n_tokens": (7, "uint32", "-"),
        "input_chunks": (8, "Input", "msg"),
        "blocks": (9, "uint32", "rep"),
        "slots": (10, "uint32", "rep"),
        "adapter_id": (11, "string", "opt"),
        "cache_len": (12, "uint32", "-"),
        "add_special_tokens": (13, "bool", "-"),
        "chunk_len": (14, "uint32", "opt"),
    },
    "Batch": {
        "id": (1, "uint64", "-"),
        "requests": (2, "Request", "rep"),
        "size": (3, "uint32", "-"),
        "max_tokens": (4, "uint32", "-"),
        "max_blocks": (5, "uint32", "-"),
    },
    "CachedBatch": {
        "id": (1, "uint64", "-"),
        "request_ids": (2, "uint64", "rep"),
        "size": (3, "uint32", "-"),
        "max_tokens": (4, "uint32", "-"),
        "current_tokens": (5, "uint32", "-"),
    },
    "GeneratedText": {
        "text": (1, "string", "-"),
        "generated_tokens": (2, "uint32", "-"),
        "finish_reason": (3, "FinishReason", "-"),
        "seed": (4, "uint64", "opt"),
    },
    "Tokens": {
        "ids": (1, "uint32", "rep"),
        "logprobs": (2, "float", "rep"),
        "texts": (3, "string", "rep"),
        "is_special": (4, "bool", "rep"),
    },
    "Generation": {
        "request_id": (1, "uint64", "-"),
        "prefill_tokens": (2, "Tokens", "msg"),
        "tokens": (3, "Tokens", "msg"),
        "generated_text": (4, "GeneratedText", "opt"),
        "top_tokens": (5, "Tokens", "rep"),
    },
    "FilterBatchRequest": {"batch_id": (1, "uint64", "-"), "request_ids": (2, "uint64", "rep")},
    "FilterBatchResponse": {"batch": (1, "CachedBatch", "msg")},
    "PrefillRequest": {"batch": (1, "Batch", "msg"), "cached_batch": (2, "CachedBatch", "msg")},
    "PrefillResponse": {
        "generations": (1, "Generation", "rep"),
        "batch": (2, "CachedBatch", "opt"),
        "forward_ns": (3, "uint64", "-"),
        "decode_ns": (4, "uint64", "-"),
        "total_ns": (5, "uint64", "-"),
        "concat_ns": (6, "uint64", "opt"),
    },
    "DecodeRequest": {"batches": (1, "CachedBatch", "rep")},
    "DecodeResponse": {
        "generations": (1, "Generation", "rep"),
        "batch": (2, "CachedBatch", "opt"),
        "forward_ns": (3, "uint64", "-"),
        "decode_ns": (4, "uint64", "-"),
        "total_ns": (5, "uint64", "-"),
        "concat_ns": (6, "uint64", "opt"),
    },
    "WarmupRequest": {
        "batch": (1, "Batch", "msg"),
        "max_input_tokens": (2, "uint32", "opt"),
        "max_prefill_tokens": (3, "uint32", "-"),
        "max_total_tokens": (4, "uint32", "opt"),
    },
    "WarmupResponse": {
        "max_supported_total_tokens": (1, "uint32", "opt"),
        "max_input_tokens": (2, "uint32", "-"),
        "max_total_tokens": (3, "uint32", "-"),
    },
}

OURS = {
    "InfoResponse": {
        "extensions": (100, "string", "rep"),
        "pipeline_depth": (101, "uint32", "opt"),
        "kv_cache_dtype": (102, "string", "opt"),
        "quantize": (103, "string", "opt"),
        "adapters": (104, "string", "rep"),
        "adapter_prefix_caching": (105, "bool", "opt"),
        "micro_batches": (106, "uint32", "opt"),
        "adapter_slots": (107, "uint32", "opt"),
        "image_reserve": (108, "uint32", "opt"),
        "speculator": (109, "string", "opt"),
        "process_namespace": (110, "string", "opt"),
        "task": (111, "string", "opt"),
        "other_ranks": (120, "InfoResponse", "rep"),
    },
    "WarmupResponse": {"other_ranks": (120, "WarmupResponse", "rep")},
    "FilterBatchResponse": {"other_ranks": (120, "FilterBatchResponse", "rep")},
    "WarmupRequest": {"extensions": (100, "string", "rep"), "sequence": (101, "uint64", "opt")},
    "ClearCacheRequest": {"sequence": (100, "uint64", "opt")},
    "FilterBatchRequest": {"sequence": (100, "uint64", "opt")},
    "Request": {
        "adapter": (104, "uint64", "opt"),
        "input_ids": (100, "uint32", "rep"),
        "resume_ids": (110, "uint32", "rep"),
        "prediction_ids": (112, "uint32", "rep"),
        "images": (120, "ImagePlace", "rep"),
    },
    "Batch": {"images": (100, "PreparedImage", "rep")},
    "PrefillRequest": {
        "sequence": (100, "uint64", "opt"),
        "unanswered": (101, "uint32", "opt"),
        "growth": (110, "BlockGrowth", "rep"),
        "chunk_tokens": (111, "uint32", "opt"),
    },
    "DecodeRequest": {
        "sequence": (100, "uint64", "opt"),
        "unanswered": (101, "uint32", "opt"),
        "growth": (110, "BlockGrowth", "rep"),
        "chunk_tokens": (111, "uint32", "opt"),
    },
    "PrefillResponse": {
        "columns": (100, "Columns", "opt"),
        "phases_ns": (101, "uint64", "rep"),
        "speculation": (102, "Speculation", "opt"),
        "images": (103, "EncodedImages", "opt"),
        "adapter_slots": (104, "AdapterSlots", "opt"),
        "other_ranks": (120, "PrefillResponse", "rep"),
    },
    "DecodeResponse": {
        "columns": (100, "Columns", "opt"),
        "phases_ns": (101, "uint64", "rep"),
        "speculation": (102, "Speculation", "opt"),
        "images": (103, "EncodedImages", "opt"),
        "other_ranks": (120, "DecodeResponse", "rep"),
    },
    "Generation": {"error": (100, "string", "opt")},
    "NextTokenChooserParameters": {
        "presence_penalty": (100, "float", "opt"),
        "absolute_frequency_penalty": (101, "float", "opt"),
        "logit_bias": (102, "LogitBias", "rep"),
        "min_p": (103, "float", "opt"),
        "min_tokens": (104, "uint32", "opt"),
    },
    "StoppingCriteriaParameters": {
        "stop_anywhere": (100, "bool", "opt"),
        "stop_token_ids": (101, "uint32", "rep"),
    },
}

ENUMS = {
    "GrammarType": {
        "GRAMMAR_TYPE_NONE": 0,
        "GRAMMAR_TYPE_JSON": 1,
        "GRAMMAR_TYPE_REGEX": 2,
        "GRAMMAR_TYPE_LARK": 100,
    },
    "FinishReason": {"FINISH_REASON_LENGTH": 0, "FINISH_REASON_EOS_TOKEN": 1, "FINISH_REASON_STOP_SEQUENCE": 2},
}

RPCS = ("Info", "ServiceDiscovery", "ClearCache", "FilterBatch", "Warmup", "Prefill", "Decode", "Health")

_TYPES = {v: k.removeprefix("TYPE_").lower() for k, v in descriptor_pb2.FieldDescriptorProto.Type.items()}


def describe(
    field: descriptor_pb2.FieldDescriptorProto, message: descriptor_pb2.DescriptorProto
) -> tuple[int, str, str]:
    kind = field.type_name.rsplit(".", 1)[-1] or _TYPES[field.type]
    if field.label == field.LABEL_REPEATED:
        return field.number, kind, "rep"
    if field.proto3_optional:
        return field.number, kind, "opt"
    if field.HasField("oneof_index"):
        return field.number, kind, f"oneof {message.oneof_decl[field.oneof_index].name}"
    return field.number, kind, "msg" if field.type == field.TYPE_MESSAGE else "-"


def fields_of(name: str) -> dict[str, tuple[int, str, str]]:
    message = descriptor_pb2.DescriptorProto()
    FILE.message_types_by_name[name].CopyToProto(message)
    return {field.name: describe(field, message) for field in message.field}


@pytest.mark.parametrize("name", STOCK)
def test_stock_fields_are_tgis(name):
    stock = {field: facts for field, facts in fields_of(name).items() if facts[0] < FIRST_EXTENSION}
    assert stock == STOCK[name]


@pytest.mark.parametrize("name", STOCK)
def test_our_fields_can_be_ignored(name):
    ours = {field: facts for field, facts in fields_of(name).items() if facts[0] >= FIRST_EXTENSION}
    assert ours == OURS.get(name, {})
    assert {presence for _, _, presence in ours.values()} <= {"opt", "rep"}


def test_there_are_no_other_messages_than_those_of_extensions():
    assert set(FILE.message_types_by_name) - set(STOCK) == {
        "AdapterSlots", "BlockGrowth", "Columns", "EncodedImages", "Feature", "ImagePlace", "LogitBias", "OtherRanks",
        "PredictedTokens", "PreparedImage", "Speculation",
    }  # fmt: skip


def test_repeated_numbers_are_packed():
    for name in FILE.message_types_by_name:
        for field in FILE.message_types_by_name[name].fields:
            numeric = field.cpp_type not in (field.CPPTYPE_STRING, field.CPPTYPE_MESSAGE)
            assert field.is_packed == (field.is_repeated and numeric), f"{name}.{field.name}"


@pytest.mark.parametrize("name", ENUMS)
def test_enums(name):
    assert {value.name: value.number for value in FILE.enum_types_by_name[name].values} == ENUMS[name]


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


def test_an_old_peer_reads_our_messages():
    """What a stock peer skips as unknown leaves the rest as it was."""
    ours = pb.DecodeRequest(batches=[pb.CachedBatch(id=3)], sequence=7).SerializeToString()
    without = pb.DecodeRequest(batches=[pb.CachedBatch(id=3)]).SerializeToString()
    assert ours.startswith(without)
