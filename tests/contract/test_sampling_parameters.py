"""A sampling parameter arrives at the shard as the router has it: both sides name it as the message does."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from model_server.rpc import convert as shard
from model_server.sampling.parameters import Grammar
from model_server.sampling.parameters import SamplingParameters as ShardParameters
from router.request import SAMPLING_RANGES, SamplingParameters, StoppingParameters, ValidRequest
from router.schemas.parameters import CommonParameters
from router.shards import convert as router
from router.shards.interface import NewBatch, NewRequest, PrefillCall

# Representable as float32, and in no field the default.
OTHER_VALUES = {bool: True, int: 3, float: 0.5, tuple: ((7, -0.5), (9, 1.5)), str: '{"type":"object"}'}


def received(sampling: SamplingParameters) -> ShardParameters:
    valid = ValidRequest(
        inputs="a",
        num_characters=1,
        input_ids=(1,),
        input_length=1,
        truncate=1,
        sampling=sampling,
        stopping=StoppingParameters(max_new_tokens=1),
    )
    new = NewRequest(request_id=1, request=valid, blocks=[1])
    message = router.prefill_to(PrefillCall(NewBatch(batch_id=1, requests=[new])))
    [request] = shard.requests_from(message.batch)
    return request.sampling


def values(parameters: SamplingParameters | ShardParameters) -> dict[str, Any]:
    return {one.name: getattr(parameters, one.name) for one in fields(parameters) if "grammar" not in one.name}


def test_every_parameter_arrives() -> None:
    defaults = SamplingParameters()
    asked: dict[str, Any] = {name: OTHER_VALUES[type(value)] for name, value in values(defaults).items()}
    sampling = SamplingParameters(**asked, grammar=OTHER_VALUES[str], grammar_kind="json")
    arrived = received(sampling)
    assert values(arrived) == values(sampling) == asked
    assert arrived.grammar == Grammar("json", OTHER_VALUES[str])


def test_what_is_off_is_off_on_both_sides() -> None:
    assert values(received(SamplingParameters())) == values(SamplingParameters()) == values(ShardParameters())


def test_tables_name_parameters_that_there_are() -> None:
    names = {one.name for one in fields(SamplingParameters)}
    assert {one.name for one in SAMPLING_RANGES} <= names
    assert set(CommonParameters.model_fields) - names == {"cache_salt", "ignore_eos", "priority"}
