"""Messages to the shard's own types and back."""

from __future__ import annotations

from typing import Any

import pytest

from model_server.batch.results import CachedBatch, FinishReason, GeneratedText, Generation, StepResult, Tokens
from model_server.errors import RequestError
from model_server.features.adapters.feature import AskedAdapter, SlotUse
from model_server.features.drafts.report import Drafted
from model_server.features.images.image import AskedImages, EncodedImages
from model_server.rpc import convert
from model_server.sampling.parameters import Grammar
from wire.processes.shared_memory import SharedMemory
from wire.v3 import generate_pb2 as pb


def _message(**fields: object) -> pb.Request:
    request = pb.Request(id=4, stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=3))
    request.MergeFrom(pb.Request(**fields))  # type: ignore[arg-type]
    return request


def _read(message: pb.Request) -> convert.NewRequest:
    (request,) = convert.requests_from(pb.Batch(requests=[message]))
    return request


def _token(token_id: int, text: str = "x") -> Tokens:
    return Tokens([token_id], [-0.5], [text], [False])


def test_a_block_that_no_cache_has_does_not_become_another() -> None:
    assert _read(_message(blocks=[2**31 - 1])).blocks.tolist() == [2**31 - 1]
    with pytest.raises(RequestError, match="request 4: block 2147483648 is outside of any cache"):
        _read(_message(blocks=[1, 2**31]))


def test_values_that_are_not_sent_are_off() -> None:
    sampling = _read(_message()).sampling
    assert (sampling.temperature, sampling.top_p, sampling.typical_p, sampling.repetition_penalty) == (1, 1, 1, 1)
    assert not sampling.samples


def test_sampling_and_stops_are_read() -> None:
    parameters = pb.NextTokenChooserParameters(
        presence_penalty=0.5, absolute_frequency_penalty=0.25, min_p=0.125,
        logit_bias=[pb.LogitBias(token_id=7, bias=-1.5)],
    )  # fmt: skip
    stopping = pb.StoppingCriteriaParameters(stop_sequences=["", "end"])
    request = _read(_message(parameters=parameters, stopping_parameters=stopping))
    assert request.sampling.presence_penalty == 0.5
    assert request.sampling.absolute_frequency_penalty == 0.25
    assert request.sampling.min_p == 0.125
    assert request.sampling.logit_bias == ((7, -1.5),)
    assert request.stopping.stop_sequences == ("end",)


def test_ids_resumption_and_new_blocks_are_read() -> None:
    request = _read(_message(input_ids=[5, 6], resume_ids=[7], cache_len=1, chunk_len=0))
    assert (request.input_ids, request.resume_ids) == ((5, 6), (7,))
    assert (request.cache_len, request.chunk_len) == (1, 0)
    assert _read(_message()).chunk_len is None
    assert _read(_message(adapter_id="poems")).asked == (AskedAdapter("poems"),)
    assert _read(_message(adapter=0, adapter_id="poems")).asked == (AskedAdapter(0),)
    assert _read(_message()).asked == () and _read(_message(adapter_id="")).asked == ()
    more = pb.BlockGrowth(request_id=4, blocks=[2**32 - 1, 3])
    for call in (
        convert.prefill_from(pb.PrefillRequest(new_blocks=[more])),
        convert.decode_from(pb.DecodeRequest(new_blocks=[more])),
    ):
        (read,) = call.new_blocks
        assert read.request_id == 4 and read.blocks.tolist() == [2**32 - 1, 3]


@pytest.mark.parametrize(
    ("grammar_type", "expected"),
    [
        (pb.GRAMMAR_TYPE_NONE, None),
        (pb.GRAMMAR_TYPE_JSON, Grammar("json", "{}")),
        (pb.GRAMMAR_TYPE_REGEX, Grammar("regex", "{}")),
    ],
)
def test_both_kinds_of_grammar_are_read(grammar_type: int, expected: Grammar | None) -> None:
    parameters = pb.NextTokenChooserParameters(grammar="{}", grammar_type=grammar_type)  # type: ignore[arg-type]
    assert _read(_message(parameters=parameters)).sampling.grammar == expected
    empty = pb.NextTokenChooserParameters(grammar="", grammar_type=grammar_type)  # type: ignore[arg-type]
    assert _read(_message(parameters=empty)).sampling.grammar is None


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(RequestError, match="max_new_tokens"):
        _read(pb.Request(id=4))


def _result() -> StepResult:
    ended = GeneratedText("all of it", 2, FinishReason.EOS_TOKEN, seed=9)
    generations = [
        Generation(request_id=1, tokens=_token(11)),
        Generation(request_id=2, tokens=_token(12), generated_text=ended),
        Generation(request_id=3, tokens=_token(13), top_tokens=[_token(13)]),
        Generation(request_id=4, error="not a number", overloaded=True),
        Generation(request_id=5, tokens=_token(15, "ü")),
    ]
    return StepResult(generations, CachedBatch(8, [1, 3, 5], 48, 3), 10, 20, 40, concat_ns=5)


def test_plain_rows_go_into_columns() -> None:
    response = convert.decode_response(_result())
    assert list(response.columns.request_ids) == [1, 5]
    assert list(response.columns.ids) == [11, 15]
    assert list(response.columns.texts) == ["x", "ü"]
    assert list(response.columns.logprobs) == [-0.5, -0.5] and list(response.columns.is_special) == [False, False]
    assert [g.request_id for g in response.generations] == [2, 3, 4]
    assert response.generations[0].generated_text.seed == 9
    assert response.generations[0].generated_text.finish_reason == pb.FINISH_REASON_EOS_TOKEN
    failed = response.generations[2]
    assert (failed.error, failed.overloaded, failed.HasField("tokens")) == ("not a number", True, False)
    assert (response.batch.id, response.batch.current_tokens) == (8, 3)
    assert (response.forward_ns, response.decode_ns, response.total_ns, response.concat_ns) == (10, 20, 40, 5)


def test_rows_of_several_tokens_are_counted() -> None:
    two = Tokens([21, 22], [-1.0, -2.0], ["a", "b"], [False, True])
    result = StepResult([Generation(1, tokens=_token(11)), Generation(2, tokens=two)], None, 1, 1, 1)
    columns = convert.decode_response(result).columns
    assert list(columns.request_ids) == [1, 2] and list(columns.counts) == [1, 2]
    assert list(columns.ids) == [11, 21, 22] and list(columns.logprobs) == [-0.5, -1.0, -2.0]
    assert list(columns.texts) == ["x", "a", "b"] and list(columns.is_special) == [False, False, True]


def test_a_result_without_a_batch_says_so() -> None:
    response = convert.decode_response(StepResult([], None, 1, 1, 1))
    assert not response.HasField("batch") and not response.HasField("columns") and not response.HasField("concat_ns")


def test_images_come_to_the_requests_that_have_them() -> None:
    feature = pb.Feature(name="pixel_values", dtype="float32", shape=[1, 2], data=b"12345678")
    sent = pb.PreparedImage(key=b"a" * 32, features=[feature], grid=[1, 2, 3], num_embeds=6)
    places = [pb.ImagePlace(key=b"a" * 32, start=2, length=7), pb.ImagePlace(key=b"b" * 32, start=9, length=1)]
    batch = pb.Batch(requests=[_message(images=places), _message()], images=[sent])
    first, second = convert.requests_from(batch)
    (asked,) = first.asked
    assert isinstance(asked, AskedImages)
    found = asked.places[0].image
    assert found is not None and (found.num_embeds, found.grid) == (6, (1, 2, 3))
    assert found.features["pixel_values"].tensor().shape == (1, 2)
    assert (asked.places[0].start, asked.places[0].stop) == (2, 9)
    assert asked.places[1].image is None and second.asked == ()


def test_arrays_in_the_routers_memory_are_opened() -> None:
    memory = SharedMemory.create()
    memory.write(0, b"....12345678")
    shared: dict[str, Any] = {"memory": memory.name, "offset": 4, "num_bytes": 8}
    feature = pb.Feature(name="pixel_values", dtype="float32", shape=[1, 2], **shared)
    gone = pb.Feature(name="image_sizes", dtype="float32", shape=[1, 2], **shared | {"memory": memory.name[:-1] + "x"})
    sent = pb.PreparedImage(key=b"a" * 32, features=[feature, gone], num_embeds=6)
    place = pb.ImagePlace(key=b"a" * 32, start=2, length=7)
    (request,) = convert.requests_from(pb.Batch(requests=[_message(images=[place])], images=[sent]))
    del memory  # the router has forgotten the image
    (asked,) = request.asked
    assert isinstance(asked, AskedImages)
    found = asked.places[0].image
    assert found is not None
    pixels = found.features["pixel_values"]
    pixels.check("pixel_values")
    assert pixels.tensor().numpy().tobytes() == b"12345678"
    # What one rank alone may have missed fails when it is read: there all ranks agree on who is left out.
    found.features["image_sizes"].check("image_sizes")
    with pytest.raises(OSError, match="could not be opened"):
        found.features["image_sizes"].tensor()


def test_what_was_encoded_is_told() -> None:
    result = StepResult([], None, 1, 2, 3, reports=(EncodedImages(1, 2, 3),))
    images = convert.prefill_response(result).images
    assert (images.hits, images.misses, images.encode_ns) == (1, 2, 3)
    assert not convert.decode_response(StepResult([], None, 1, 2, 3)).HasField("images")


def test_slots_of_adapters_are_told_where_requests_come() -> None:
    result = StepResult([], None, 1, 2, 3, reports=(SlotUse(4, 2),))
    slots = convert.prefill_response(result).adapter_slots
    assert (slots.loads, slots.held) == (4, 2)
    assert convert.decode_response(result) == convert.decode_response(StepResult([], None, 1, 2, 3))


def test_what_became_of_predictions_is_told() -> None:
    drafted = Drafted(4, (0, 0, 7, 0), (0, 0, 5, 0), {3: (4, 0), 9: (1, 2)})
    for response in (convert.prefill_response, convert.decode_response):
        said = response(StepResult([], None, 1, 2, 3, reports=(drafted,))).speculation
        assert (said.drafted, said.accepted) == (7, 5)
        assert [(one.request_id, one.accepted, one.rejected) for one in said.predicted] == [(3, 4, 0), (9, 1, 2)]
