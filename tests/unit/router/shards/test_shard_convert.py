"""Domain to protobuf and back: every field, and extensions only where the shards know them."""

from __future__ import annotations

import math

import pytest
from support.factories import OURS, make_request

from router.api.json_out import dumps
from router.request import SamplingParameters, StoppingParameters
from router.shards import convert, warm_up
from router.shards.interface import NewBatch, NewRequest
from wire.extensions import Extension
from wire.v3 import generate_pb2 as pb

SAMPLING = SamplingParameters(
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    typical_p=0.75,
    min_p=0.125,
    do_sample=True,
    seed=2**64 - 1,
    repetition_penalty=1.5,
    frequency_penalty=-1.0,
    presence_penalty=0.5,
    absolute_frequency_penalty=0.25,
    logit_bias=((5, -100.0), (6, 1.5)),
    watermark=True,
    grammar="[0-9]+",
    grammar_kind="regex",
)


def to_wire(extensions=frozenset(), **changes) -> pb.Request:
    request = make_request("hello", 3, 7, **changes)
    new = NewRequest(9, request, [4, 5], range(8, 12), cache_len=2)
    batch = convert.batch_to(NewBatch(3, [new], max_tokens=11, max_blocks=2), extensions)
    assert (batch.id, batch.size, batch.max_tokens, batch.max_blocks) == (3, 1, 11, 2)
    return batch.requests[0]


def test_every_upstream_field_of_a_request():
    message = to_wire(
        sampling=SAMPLING,
        stopping=StoppingParameters(max_new_tokens=7, stop_sequences=("x", "y"), ignore_eos_token=True),
        truncate=2,
        add_special_tokens=False,
        decoder_input_details=True,
        top_n_tokens=4,
        adapter_id="lora",
    )
    assert message.id == 9
    assert message.inputs == "hello x x"
    assert [c.text for c in message.input_chunks.chunks] == ["hello x x"]
    assert (message.truncate, message.add_special_tokens, message.top_n_tokens) == (2, False, 4)
    assert message.prefill_logprobs
    assert list(message.blocks) == [4, 5]
    assert list(message.slots) == [8, 9, 10, 11]
    assert (message.cache_len, message.HasField("chunk_len"), message.adapter_id) == (2, False, "lora")
    p = message.parameters
    assert (p.temperature, p.top_k, p.top_p, p.typical_p, p.do_sample) == (0.5, 3, 0.25, 0.75, True)
    assert (p.seed, p.repetition_penalty, p.frequency_penalty, p.watermark) == (2**64 - 1, 1.5, -1.0, True)
    assert (p.grammar, p.grammar_type) == ("[0-9]+", pb.GRAMMAR_TYPE_REGEX)
    s = message.stopping_parameters
    assert (s.max_new_tokens, list(s.stop_sequences), s.ignore_eos_token) == (7, ["x", "y"], True)


def test_an_upstream_shard_sees_no_extension():
    message = to_wire(sampling=SAMPLING, stopping=StoppingParameters(max_new_tokens=7, stop_sequences=("x",)))
    assert message.parameters.ListFields()[-1][0].number < 100
    assert message.stopping_parameters.ListFields()[-1][0].number < 100


def test_our_shards_see_the_extensions_in_use():
    stopping = StoppingParameters(max_new_tokens=7, stop_sequences=("x",))
    message = to_wire(OURS, sampling=SAMPLING, stopping=stopping)
    p = message.parameters
    assert (p.presence_penalty, p.absolute_frequency_penalty, p.min_p) == (0.5, 0.25, 0.125)
    assert [(b.token_id, b.bias) for b in p.logit_bias] == [(5, -100.0), (6, 1.5)]
    assert message.stopping_parameters.stop_anywhere


@pytest.mark.parametrize("ids", [(1, 2, 3), ()])
def test_a_prompt_travels_as_its_token_ids_or_as_its_text(ids):
    """A shard that takes ids tokenises the text where there is none."""
    message = to_wire(frozenset({Extension.TOKEN_IDS}), input_ids=ids)
    assert tuple(message.input_ids) == ids
    assert (message.inputs, message.HasField("input_chunks")) == (("", False) if ids else ("hello x x", True))
    message = to_wire(input_ids=ids)
    assert (list(message.input_ids), message.inputs) == ([], "hello x x")
    assert [chunk.text for chunk in message.input_chunks.chunks] == ["hello x x"]


def test_switched_off_is_sent_as_one_not_as_nothing():
    p = to_wire().parameters
    assert (p.temperature, p.top_p, p.typical_p, p.repetition_penalty) == (1.0, 1.0, 1.0, 1.0)


def test_the_probe_is_tgis():
    batch = convert.probe_to().batch
    (request,) = batch.requests
    assert (batch.id, request.id, batch.size, batch.max_tokens, batch.max_blocks) == (2**64 - 1, 2**64 - 1, 1, 2, 1)
    assert (request.inputs, request.truncate, request.add_special_tokens) == ("liveness", 1, False)
    assert (list(request.blocks), list(request.slots)) == ([0], [0])
    assert request.stopping_parameters.max_new_tokens == 1


def test_columns_with_several_tokens_a_row():
    columns = pb.Columns(
        request_ids=[4, 6], ids=[5, 7, 8], logprobs=[-1, -2, -3], texts=["a", "b", "c"],
        is_special=[False, True, False], counts=[1, 2],
    )  # fmt: skip
    reply = convert.step_from([pb.DecodeResponse(columns=columns)])
    assert not reply.columns
    assert [(r.request_id, [(t.id, t.text, t.logprob, t.special) for t in r.tokens]) for r in reply.rows] == [
        (4, [(5, "a", -1.0, False)]),
        (6, [(7, "b", -2.0, True), (8, "c", -3.0, False)]),
    ]


def test_drafts_are_counted_by_what_guessed_them():
    said = pb.Speculation(drafted=5, accepted=3, window=4, drafted_by_kind=[4, 1], accepted_by_kind=[2, 1])
    silent = pb.Speculation(drafted=2, accepted=1, window=2)
    reply = convert.step_from([pb.DecodeResponse(speculation=one) for one in (said, silent)])
    assert reply.drafted is not None and (reply.drafted.num_tokens, reply.drafted.longest) == (7, 4)
    assert reply.drafted.labelled() == {"lookup": (4, 2), "grammar": (1, 1), "other": (2, 1)}
    assert reply.drafted.predicted == {}


def test_each_rank_says_what_became_of_the_predictions_of_its_requests():
    ranks = [
        pb.Speculation(predicted=[pb.PredictedTokens(request_id=4, accepted=3, rejected=1)]),
        pb.Speculation(predicted=[pb.PredictedTokens(request_id=7, rejected=2)]),
    ]
    reply = convert.step_from([pb.DecodeResponse(speculation=one) for one in ranks])
    assert reply.drafted is not None and reply.drafted.predicted == {4: (3, 1), 7: (0, 2)}


def test_images_are_counted_once_for_all_ranks():
    ranks = [pb.EncodedImages(hits=1, misses=2, encode_ns=ns) for ns in (2_000_000, 3_000_000)]
    reply = convert.step_from([pb.PrefillResponse(images=one) for one in ranks])
    assert reply.images is not None and (reply.images.hits, reply.images.misses) == (1, 2)
    assert reply.images.encode_s == pytest.approx(0.003)
    assert convert.step_from([pb.PrefillResponse()]).images is None


@pytest.mark.parametrize("counts", [(), (1, 1)], ids=["columns", "rows"])
def test_logprobs_are_written_as_short_as_a_float32(counts: tuple[int, ...]):
    columns = pb.Columns(
        request_ids=[4, 6], ids=[5, 7], logprobs=[-1.2345678806304932, -math.inf], texts=["a", "b"],
        is_special=[False, False], counts=counts,
    )  # fmt: skip
    reply = convert.step_from([pb.DecodeResponse(columns=columns)])
    logprobs = [token.logprob for row in reply.rows for token in row.tokens] or reply.columns[0].logprobs
    assert dumps(logprobs) == b"[-1.2345679,null]"


def test_rows_of_all_ranks_and_the_slowest_timings():
    fast = pb.DecodeResponse(total_ns=1, forward_ns=10**9, columns=pb.Columns(request_ids=[0], ids=[5], logprobs=[-1],
        texts=["t"], is_special=[True]))  # fmt: skip
    slow = pb.DecodeResponse(
        total_ns=2,
        forward_ns=2 * 10**9,
        concat_ns=10**6,
        batch=pb.CachedBatch(id=1, request_ids=[0, 1], size=2, max_tokens=9, current_tokens=2),
        generations=[
            pb.Generation(
                request_id=1,
                prefill_tokens=pb.Tokens(ids=[1, 2], logprobs=[math.nan, -1], texts=["p", "q"]),
                tokens=pb.Tokens(ids=[7, 8], logprobs=[-1, -2], texts=["a", "b"], is_special=[False, True]),
                top_tokens=[pb.Tokens(ids=[7], logprobs=[-1], texts=["a"], is_special=[False])] * 2,
                generated_text=pb.GeneratedText(
                    text="ab", generated_tokens=2, finish_reason=pb.FINISH_REASON_STOP_SEQUENCE, seed=0
                ),
            )
        ],
    )
    reply = convert.step_from([fast, slow])
    assert (reply.timings.forward_s, reply.timings.concat_s) == (2.0, 0.001)
    assert (reply.batch.batch_id, list(reply.batch.request_ids), reply.batch.max_tokens) == (1, [0, 1], 9)
    (columns,) = reply.columns
    assert (columns.request_ids, columns.ids, columns.texts, columns.is_special) == ([0], [5], ["t"], [True])
    (row,) = reply.rows
    assert [t.text for t in row.tokens] == ["a", "b"]
    assert [t.special for t in row.prefill_tokens] == [False, False]
    assert len(row.top_tokens) == 2
    assert (row.ended.finish_reason, row.ended.seed, row.ended.generated_tokens) == ("stop_sequence", 0, 2)


def test_info_is_what_all_ranks_share():
    ours = pb.InfoResponse(
        block_size=16, dtype="torch.float16", extensions=["run_ahead", "columns"], window_size=8, pipeline_depth=3
    )
    other = pb.InfoResponse(block_size=16, dtype="torch.float16", extensions=["columns"], window_size=8)
    info = convert.info_from([ours, other])
    assert info.extensions == {"columns"}
    assert (info.block_size, info.window_size) == (16, 8)
    assert (info.pipeline_depth, convert.info_from([ours]).pipeline_depth) == (1, 3)
    with pytest.raises(ValueError, match="disagree"):
        convert.info_from([ours, pb.InfoResponse(block_size=1, dtype="torch.float16", window_size=8)])


def test_the_type_of_the_cache_is_the_models_unless_a_shard_says_so():
    plain, narrow = (pb.InfoResponse(dtype="torch.float16", kv_cache_dtype=t) for t in (None, "torch.float8_e5m2"))
    assert convert.info_from([plain]).kv_cache_dtype == "torch.float16"
    assert convert.info_from([narrow]).kv_cache_dtype == "torch.float8_e5m2"
    with pytest.raises(ValueError, match="disagree"):
        convert.info_from([plain, narrow])


def test_the_fewest_adapter_slots_of_all_ranks_count() -> None:
    def slots(*given: int | None) -> int | None:
        return convert.info_from([pb.InfoResponse(block_size=1, adapter_slots=one) for one in given]).adapter_slots

    assert (slots(None, None), slots(8, 4), slots(None, 4)) == (None, 4, 4)


def test_positions_are_kept_for_drafts_only_of_shards_that_do_not_cut_them():
    ours, stock = (
        convert.info_from([pb.InfoResponse(speculate=3, support_chunking=True, extensions=extensions)])
        for extensions in (["windows"], [])
    )
    assert (ours.speculate, ours.reserved_draft_tokens, ours.chunks) == (3, 0, True)
    assert (stock.speculate, stock.reserved_draft_tokens, stock.chunks) == (3, 3, False)


def test_what_drafts():
    found = [convert.info_from([pb.InfoResponse(speculator=kind)]).speculator for kind in (None, "mtp")]
    assert found == [None, "mtp"]


def test_the_method_of_quantized_weights():
    plain, packed = (pb.InfoResponse(quantize=method) for method in (None, "gptq"))
    assert [convert.info_from([message]).quantize for message in (plain, packed)] == [None, "gptq"]
    with pytest.raises(ValueError, match="disagree"):
        convert.info_from([plain, packed])


class TestWarmUp:
    def test_fills_one_prefill(self):
        plan = warm_up.WarmUpPlan(
            max_input_tokens=1000, max_prefill_tokens=2500, max_total_tokens=1100, max_batch_size=None
        )
        message = warm_up.request_to(plan)
        assert [r.truncate for r in message.batch.requests] == [1000, 1000, 500]
        assert [r.stopping_parameters.max_new_tokens for r in message.batch.requests] == [100, 100, 600]
        assert (message.max_input_tokens, message.max_prefill_tokens, message.max_total_tokens) == (1000, 2500, 1100)
        first, second = message.batch.requests[0], message.batch.requests[1]
        assert first.inputs.count("_test ") == 1000
        assert [c.WhichOneof("chunk") for c in first.input_chunks.chunks] == ["text", "image"]
        assert [c.WhichOneof("chunk") for c in second.input_chunks.chunks] == ["text"]
        assert {r.id for r in message.batch.requests} == {0}
        assert not first.blocks
        assert first.parameters.watermark
        assert first.stopping_parameters.ignore_eos_token

    def test_without_limits_one_prompt_fills_it(self):
        plan = warm_up.WarmUpPlan(max_input_tokens=None, max_prefill_tokens=30, max_total_tokens=None, max_batch_size=1)
        message = warm_up.request_to(plan)
        assert [r.truncate for r in message.batch.requests] == [30]
        assert message.batch.requests[0].stopping_parameters.max_new_tokens == 1
        assert not message.HasField("max_input_tokens")
        assert not message.HasField("max_total_tokens")

    def test_new_tokens_never_drop_below_one(self):
        plan = warm_up.WarmUpPlan(max_input_tokens=None, max_prefill_tokens=30, max_total_tokens=20, max_batch_size=9)
        assert warm_up.request_to(plan).batch.requests[0].stopping_parameters.max_new_tokens == 1

    def test_the_smallest_answer_counts(self):
        answers = [
            pb.WarmupResponse(max_supported_total_tokens=200, max_input_tokens=9, max_total_tokens=10),
            pb.WarmupResponse(max_supported_total_tokens=100, max_input_tokens=90, max_total_tokens=91),
        ]
        assert warm_up.capacity_from(answers).total_tokens == 100
        padded = pb.WarmupResponse(max_input_tokens=9, max_total_tokens=10)
        assert warm_up.capacity_from([*answers, padded]).total_tokens is None
