"""Domain to protobuf and back: every field."""

from __future__ import annotations

import math

import pytest
from support.factories import make_request

from router.api.json_out import dumps
from router.events import Token
from router.request import SamplingParameters, StoppingParameters
from router.shards import convert, warm_up
from router.shards.interface import NewBatch, NewRequest, PrefillCall
from wire.protocol import PROTOCOL
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


def to_wire(**changes) -> pb.Request:
    new = NewRequest(9, make_request("hello", 3, 7, **changes), [4, 5], cache_len=2)
    batch = convert.prefill_to(PrefillCall(NewBatch(3, [new]))).batch
    assert batch.id == 3
    return batch.requests[0]


def test_every_field_of_a_request():
    stopping = StoppingParameters(
        max_new_tokens=7, stop_sequences=("x", "y"), ignore_eos_token=True, stop_token_ids=(8,)
    )
    message = to_wire(
        input_ids=(1, 2, 3), sampling=SAMPLING, stopping=stopping, decoder_input_details=True, top_n_tokens=4,
        adapter_id="lora", prediction_ids=(5, 6),
    )  # fmt: skip
    assert (message.id, message.top_n_tokens, message.prefill_logprobs) == (9, 4, True)
    assert [list(ids) for ids in (message.input_ids, message.blocks, message.prediction_ids)] == [
        [1, 2, 3], [4, 5], [5, 6],
    ]  # fmt: skip
    assert (message.cache_len, message.HasField("chunk_len"), message.adapter_id) == (2, False, "lora")
    p = message.parameters
    assert (p.temperature, p.top_k, p.top_p, p.typical_p, p.do_sample) == (0.5, 3, 0.25, 0.75, True)
    assert (p.seed, p.repetition_penalty, p.frequency_penalty, p.watermark) == (2**64 - 1, 1.5, -1.0, True)
    assert (p.grammar, p.grammar_type) == ("[0-9]+", pb.GRAMMAR_TYPE_REGEX)
    assert (p.presence_penalty, p.absolute_frequency_penalty, p.min_p) == (0.5, 0.25, 0.125)
    assert [(b.token_id, b.bias) for b in p.logit_bias] == [(5, -100.0), (6, 1.5)]
    s = message.stopping_parameters
    assert (s.max_new_tokens, list(s.stop_sequences), s.ignore_eos_token) == (7, ["x", "y"], True)
    assert list(s.stop_token_ids) == [8]


def test_switched_off_is_sent_as_one_not_as_nothing():
    p = to_wire().parameters
    assert (p.temperature, p.top_p, p.typical_p, p.repetition_penalty) == (1.0, 1.0, 1.0, 1.0)


def test_the_probe_generates_one_token_in_the_reserved_block():
    batch = convert.probe_to().batch
    (request,) = batch.requests
    assert batch.id == request.id == 2**64 - 1
    assert (list(request.input_ids), list(request.blocks)) == ([0], [0])
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
        batch=pb.CachedBatch(id=1, request_ids=[0, 1], max_tokens=9, current_tokens=2),
        generations=[
            pb.Generation(
                request_id=1,
                prefill_tokens=pb.Tokens(ids=[1, 2], logprobs=[math.nan, -1], texts=["p", "q"]),
                prefill_top_tokens=pb.Tokens(ids=[4, 2], logprobs=[-0.5, -1], texts=["r", "q"]),
                prefill_top_count=2,
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
    assert row.prefill_top_tokens.at(-1) == (Token(4, "r", -0.5), Token(2, "q", -1)), "at the place of the last token"
    assert row.prefill_top_tokens.at(-2) == (), "nothing is known of the first"
    assert len(row.top_tokens) == 2
    assert (row.ended.finish_reason, row.ended.seed, row.ended.generated_tokens) == ("stop_sequence", 0, 2)


def said(**changes) -> pb.InfoResponse:
    return pb.InfoResponse(protocol=PROTOCOL, **{"block_size": 16, "dtype": "torch.float16", **changes})


def test_info_is_what_all_ranks_share():
    one, other = said(grows=True, images=True, pipeline_depth=3), said(grows=True)
    info = convert.info_from([one, other])
    assert (info.grows, info.images, info.block_size) == (True, False, 16)
    assert (info.pipeline_depth, convert.info_from([one]).pipeline_depth) == (1, 3)
    with pytest.raises(ValueError, match="disagree"):
        convert.info_from([one, said(block_size=1)])


def test_shards_of_another_release_are_refused_in_one_sentence():
    with pytest.raises(
        ValueError, match=r"^the shards speak protocol 0, this router \d+: start both from one release$"
    ):
        convert.info_from([said(), pb.InfoResponse(block_size=16, dtype="torch.float16")])


def test_shards_say_the_type_of_the_cache():
    narrow = said(kv_cache_dtype="torch.float8_e5m2")
    assert convert.info_from([narrow]).kv_cache_dtype == "torch.float8_e5m2"
    with pytest.raises(ValueError, match="disagree"):
        convert.info_from([said(kv_cache_dtype="torch.float16"), narrow])


def test_the_fewest_adapter_slots_of_all_ranks_count() -> None:
    def slots(*given: int | None) -> int | None:
        return convert.info_from([said(adapter_slots=one) for one in given]).adapter_slots

    assert (slots(None, None), slots(8, 4), slots(None, 4)) == (None, 4, 4)


def test_what_drafts():
    found = [convert.info_from([said(speculator=kind)]).speculator for kind in (None, "mtp")]
    assert found == [None, "mtp"]


def test_the_method_of_quantized_weights():
    plain, packed = (said(quantize=method) for method in (None, "gptq"))
    assert [convert.info_from([message]).quantize for message in (plain, packed)] == [None, "gptq"]
    with pytest.raises(ValueError, match="disagree"):
        convert.info_from([plain, packed])


class TestWarmUp:
    def test_fills_one_prefill(self):
        plan = warm_up.WarmUpPlan(
            max_input_tokens=1000, max_prefill_tokens=2500, max_total_tokens=1100, max_batch_size=None
        )
        message = warm_up.request_to(plan)
        assert [len(r.input_ids) for r in message.batch.requests] == [1000, 1000, 500]
        assert [r.stopping_parameters.max_new_tokens for r in message.batch.requests] == [100, 100, 600]
        assert (message.max_input_tokens, message.max_prefill_tokens, message.max_total_tokens) == (1000, 2500, 1100)
        first = message.batch.requests[0]
        assert {r.id for r in message.batch.requests} == {0}
        assert not first.blocks
        assert first.parameters.watermark
        assert first.stopping_parameters.ignore_eos_token

    def test_without_limits_one_prompt_fills_it(self):
        plan = warm_up.WarmUpPlan(max_input_tokens=None, max_prefill_tokens=30, max_total_tokens=None, max_batch_size=1)
        message = warm_up.request_to(plan)
        assert [len(r.input_ids) for r in message.batch.requests] == [30]
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
