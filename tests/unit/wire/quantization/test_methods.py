"""What `--quantize` makes of a checkpoint: the table of flags and methods, and each refusal word by word."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from wire.quantization.methods import NAMES_STORED, ON_LOAD, STORED, Choice, Quantize, choose, method_of

CT = "compressed-tensors"
SERVED = (
    "gptq, awq, auto-round, intel/auto-round, marlin, exl2, mxfp4, compressed-tensors, fbgemm_fp8, fp8, modelopt FP8, "
    "modelopt NVFP4, modelopt MXFP4, modelopt MXFP8, bitsandbytes, torchao, gguf"
)


class Refused(Exception):
    """The kind of error that a caller asks for."""


def chosen(flag: str | None, said: dict[str, Any] | None) -> Choice:
    return choose(flag, said, "org/m", Refused)


def refusal(flag: str | None, said: dict[str, Any] | None) -> str:
    with pytest.raises(Refused) as refused:
        chosen(flag, said)
    return str(refused.value)


def mixed(*algorithms: str) -> dict[str, Any]:
    """As modelopt says how each module of a model is stored."""
    layers = {f"m.{place}": {"quant_algo": algorithm} for place, algorithm in enumerate(algorithms)}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"bits": 4}, "unknown"),
        ({"quant_method": None}, "unknown"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt FP8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "modelopt NVFP4"),
        ({"quant_method": "modelopt"}, "modelopt None"),
        ({"quant_method": CT, "format": "pack-quantized"}, CT),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "modelopt NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, "modelopt MXFP4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt NVFP4_AWQ"),
        (mixed("NVFP4", "FP8"), "modelopt NVFP4"),
        (mixed("FP8", "W8A16"), "modelopt MIXED_PRECISION with W8A16"),
        (mixed(), "modelopt MIXED_PRECISION"),
        ({"quant_method": CT, "format": "nvfp4-pack-quantized"}, CT),
        ({"quant_method": CT, "format": "mxfp6-pack-quantized"}, f"{CT} mxfp6-pack-quantized"),
        ({"quant_method": CT, "sparsity_config": {"format": "dense"}}, CT),
        ({"quant_method": CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, f"{CT} sparse-24-bitmask"),
        ({"quant_method": CT, "transform_config": {"config_groups": {"u": {}}}}, f"{CT} with transforms"),
        ({"quant_method": CT, "transform_config": {}}, CT),
        ({"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_v2"}, "gptq"),
        ({"quant_method": "gptq", "bits": 5}, "gptq of 5 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "gptq"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "bitblas"}, "gptq in bitblas format"),
        ({"quant_method": "gptq", "bits": 4, "format": "bitblas"}, "gptq in bitblas format"),
        ({"quant_method": "auto-round", "data_type": "int", "rotation_config": None}, "auto-round"),
        ({"quant_method": "auto-round", "rotation_config": {"block_size": 32}}, "auto-round with rotations"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "gptq with rotations"),
        ({"quant_method": "awq", "bits": 4, "rotation": "random"}, "awq with rotations"),
        ({"quant_method": "gptq", "bits": 4, "rotation": None}, "gptq"),
        ({"quant_method": "intel/auto-round", "data_type": "mx_int"}, "intel/auto-round of data type mx_int"),
        ({"quant_method": "auto-round", "data_type": "nvfp4_v2"}, "auto-round of data type nvfp4_v2"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, "awq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq of version gemv"),
        ({"quant_method": "awq", "bits": 8}, "awq of 8 bits"),
    ],
)
def test_what_a_config_names(config: dict[str, Any], named: str) -> None:
    assert method_of(config) == named


def test_folders_of_mlx() -> None:
    assert "if it was made for MLX, which is not served, give the model" in refusal(None, {"bits": 4, "group_size": 64})


def test_the_words_of_the_flag() -> None:
    assert set(NAMES_STORED) | set(ON_LOAD) <= set(get_args(Quantize))


@pytest.mark.parametrize("method", STORED)
def test_no_flag_serves_what_is_stored(method: str) -> None:
    name, _, algorithm = method.partition(" ")
    assert chosen(None, {"quant_method": name, "quant_algo": algorithm}) == Choice(method)


@pytest.mark.parametrize(
    ("flag", "method"),
    [
        ("gptq", "gptq"), ("marlin", "gptq"), ("gptq", "awq"), ("awq", "awq"), ("gptq", "auto-round"),
        ("awq", "auto-round"), ("marlin", "marlin"), ("exl2", "exl2"), (CT, CT), ("fp8", "fp8"), ("fp8", "fbgemm_fp8"),
    ],
)  # fmt: skip
def test_a_flag_that_names_what_is_stored(flag: str, method: str) -> None:
    assert chosen(flag, {"quant_method": method}) == Choice(method)


@pytest.mark.parametrize(
    ("flag", "method"), [("awq", "gptq"), ("exl2", "awq"), ("marlin", "awq"), (CT, "fp8"), ("gptq", CT)]
)
def test_a_flag_that_names_another_stored_format(flag: str, method: str) -> None:
    found = chosen(flag, {"quant_method": method})
    assert (found.method, found.on_load) == (method, False)
    assert found.warning == f"`--quantize {flag}` names another format than that of org/m: {method}, which is served"


INT8 = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"group_size": None}}
BY_MODULE = {
    "_type": "FqnToConfig",
    "_data": {"fqn_to_config": {"a": INT8, "b": {"_type": "NVFP4InferenceConfig"}, "_default": None}},
}


def torchao(default: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": default}}


@pytest.mark.parametrize(
    "default",
    [
        INT8,
        "int8_weight_only",
        {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"a": INT8, "_default": None}}},
        *({"_type": kind} for kind in ("Float8WeightOnlyConfig", "IntxWeightOnlyConfig")),
    ],
)
def test_kinds_of_torchao_that_are_served(default: Any) -> None:
    assert chosen(None, torchao(default)).method == "torchao"


FP4_FILE = {"quant_method": "bitsandbytes", "load_in_4bit": True}
NF4_FILE = {**FP4_FILE, "bnb_4bit_quant_type": "nf4"}
BYTES_FILE = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize(
    ("flag", "said", "same"),
    [
        (None, NF4_FILE, True), ("bitsandbytes", NF4_FILE, True), ("bitsandbytes-nf4", NF4_FILE, True),
        ("bitsandbytes-fp4", FP4_FILE, True), ("bitsandbytes", BYTES_FILE, True),
        ("bitsandbytes-fp4", NF4_FILE, False), ("bitsandbytes-nf4", BYTES_FILE, False), ("gptq", NF4_FILE, False),
    ],
)  # fmt: skip
def test_files_of_bitsandbytes(flag: str | None, said: dict[str, Any], same: bool) -> None:
    """The words of its three kinds are the method's own; a word for another kind is a warning."""
    found = chosen(flag, said)
    assert (found.method, found.on_load, found.warning is None) == ("bitsandbytes", False, same)


def test_plain_weights() -> None:
    assert chosen(None, None) == Choice()
    assert [chosen(flag, None) for flag in ON_LOAD] == [Choice(flag, on_load=True) for flag in ON_LOAD]


@pytest.mark.parametrize("flag", ["gptq", "awq", "exl2", "marlin", CT])
def test_a_stored_format_is_asked_of_plain_weights(flag: str) -> None:
    assert refusal(flag, None) == (
        f"`--quantize {flag}` names a stored format, but org/m holds plain weights; leave it out, or quantize on load "
        "with fp8, eetq or bitsandbytes-nf4"
    )


@pytest.mark.parametrize("flag", ["eetq", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8"])
def test_quantized_weights_are_not_quantized_again(flag: str) -> None:
    assert refusal(flag, {"quant_method": "awq"}) == (
        f"`--quantize {flag}` quantizes plain weights on load, but org/m is stored as awq; leave it out"
    )


@pytest.mark.parametrize(
    ("said", "named"),
    [
        *(({"quant_method": name}, name) for name in ("hqq", "quanto", "aqlm", "vptq", "spqr", "higgs", "quark")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt NVFP4_AWQ"),
        ({"quant_method": CT, "format": "mxfp6-pack-quantized"}, f"{CT} mxfp6-pack-quantized"),
        ({"quant_method": CT, "format": "marlin-24"}, f"{CT} marlin-24"),
        ({"quant_method": "gptq", "bits": 6}, "gptq of 6 bits"),
        (torchao({"_type": "Int4WeightOnlyConfig", "_data": {}}), "torchao Int4WeightOnlyConfig"),
        (torchao("int4_weight_only"), "torchao int4_weight_only"),
        (torchao(BY_MODULE), "torchao NVFP4InferenceConfig"),
        ({"quant_method": "awq", "version": "gemv"}, "awq of version gemv"),
        ({"quant_method": "auto-round", "bits": 5, "data_type": "int"}, "auto-round of 5 bits"),
        ({"quant_method": "fp8", "weight_scale_semantics": "log"}, "fp8 with log scales"),
        ({"quant_method": "gguf", "format": "q_k_m"}, "gguf inside other files"),
    ],
)
@pytest.mark.parametrize("flag", [None, "gptq", "eetq"])
def test_methods_that_are_refused_by_name(flag: str | None, said: dict[str, Any], named: str) -> None:
    assert refusal(flag, said) == f"org/m is quantized with {named}, which is not served; served are {SERVED}"


@pytest.mark.parametrize("status", ["initialized", "calibration", "compressed", "frozen"])
def test_a_quantization_that_was_not_finished(status: str) -> None:
    said = {"quant_method": CT, "quantization_status": status}
    if status in ("compressed", "frozen"):
        assert chosen(None, said).method == CT
    else:
        assert refusal(None, said) == f"the quantization of org/m was not finished (status {status})"


@pytest.mark.parametrize("flag", get_args(Quantize))
def test_no_flag_names_what_a_gguf_file_holds(flag: str) -> None:
    assert refusal(flag, {"quant_method": "gguf"}) == (
        f"`--quantize {flag}`: org/m is a GGUF file, which is served as it is stored; leave it out"
    )
