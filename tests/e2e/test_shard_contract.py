"""A real shard process, driven over its socket by a plain `generate.v3` client as a stock TGI router would do it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from support.running_server import free_port
from support.shard_process import ShardProcess
from support.tiny_models import tiny_checkpoint

from wire.v3 import generate_pb2 as pb
from wire.v3.generate_pb2_grpc import TextGenerationServiceStub

pytestmark = pytest.mark.e2e

MAX_UINT64 = 2**64 - 1
BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shard(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardProcess]:
    process = ShardProcess(model, tmp_path_factory.mktemp("socket") / "s")
    try:
        process.wait_ready()
        _warm_up(process.stub)
        yield process
    finally:
        process.stop()


@pytest.fixture
def stub(shard: ShardProcess) -> TextGenerationServiceStub:
    shard.stub.ClearCache(pb.ClearCacheRequest(), timeout=120)
    return shard.stub


def _request(request_id: int, text: str, new_tokens: int, first_block: int = 0) -> pb.Request:
    """As a stock router writes it; `first_block` 0 leaves blocks to the shard."""
    request = pb.Request(
        id=request_id, inputs=text, truncate=64, add_special_tokens=True,
        input_chunks=pb.Input(chunks=[pb.InputChunk(text=text)]),
        parameters=pb.NextTokenChooserParameters(
            temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0, seed=1
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=new_tokens, ignore_eos_token=True),
    )  # fmt: skip
    if first_block:
        blocks = list(range(first_block, first_block + 6))
        request.blocks.extend(blocks)
        request.slots.extend(b * BLOCK + o for b in blocks for o in range(BLOCK))
    return request


def _batch(batch_id: int, *requests: pb.Request) -> pb.Batch:
    return pb.Batch(id=batch_id, requests=requests, size=len(requests), max_tokens=64, max_blocks=6)


def _warm_up(stub: TextGenerationServiceStub, extensions: Sequence[str] = (), **limits: int) -> pb.WarmupResponse:
    request = _request(0, "_test " * 200, 20)
    request.truncate = 200
    request.parameters.MergeFrom(
        pb.NextTokenChooserParameters(
            temperature=0.9, top_k=10, top_p=0.9, typical_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1,
            watermark=True,
        )
    )  # fmt: skip
    request.prefill_logprobs = True
    request.top_n_tokens = 20
    message = pb.WarmupRequest(batch=_batch(0, request), max_prefill_tokens=512, extensions=extensions, **limits)
    response: pb.WarmupResponse = stub.Warmup(message, timeout=120)
    return response


def _run_out(stub: TextGenerationServiceStub, batch: pb.Batch) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {r.id: [] for r in batch.requests}
    response = stub.Prefill(pb.PrefillRequest(batch=batch), timeout=120)
    while True:
        for generation in response.generations:
            tokens[generation.request_id].extend(generation.tokens.ids)
        if not response.HasField("batch"):
            return tokens
        going = [i for i in response.batch.request_ids if i not in _ended(response)]
        kept = stub.FilterBatch(pb.FilterBatchRequest(batch_id=response.batch.id, request_ids=going), timeout=120)
        response = stub.Decode(pb.DecodeRequest(batches=[kept.batch]), timeout=120)


def _ended(response: pb.PrefillResponse | pb.DecodeResponse) -> set[int]:
    return {g.request_id for g in response.generations if g.HasField("generated_text")}


def test_info_and_discovery(shard: ShardProcess, stub: TextGenerationServiceStub) -> None:
    info = stub.Info(pb.InfoRequest(), timeout=120)
    assert (info.requires_padding, info.dtype, info.device_type) == (False, "torch.float32", "cpu")
    assert (info.support_chunking, info.use_prefix_caching, info.speculate) == (True, True, 0)
    assert {"token_ids", "grow"} <= set(info.extensions)
    assert info.attention_impl in {"paged", "flashdecoding", "flashinfer"}
    assert info.block_size == BLOCK and not info.HasField("window_size")
    urls = stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=120).urls
    assert urls == [f"unix://{shard.socket}"]


def test_warm_up_echoes_limits_and_can_be_repeated(shard: ShardProcess) -> None:
    asked = _warm_up(shard.stub, max_input_tokens=100, max_total_tokens=300)
    assert (asked.max_input_tokens, asked.max_total_tokens) == (100, 300)
    free = _warm_up(shard.stub)
    assert free.max_supported_total_tokens >= 16_000 and free.max_supported_total_tokens % BLOCK == 0
    assert free.max_total_tokens == 2048 and free.max_input_tokens == 2047, "the model's positions, not one prefill"


def test_a_text_model_refuses_images(stub: TextGenerationServiceStub) -> None:
    request = _request(5, "Hello", 1, 1)
    request.input_chunks.chunks.add(image=pb.Image(data=b"x", mimetype="image/png"))
    with pytest.raises(grpc.RpcError) as raised:
        stub.Prefill(pb.PrefillRequest(batch=_batch(3, request)), timeout=120)
    assert raised.value.details() == "request 5: this model takes text only, not images"


def test_one_token_leaves_nothing_cached(stub: TextGenerationServiceStub) -> None:
    response = stub.Prefill(pb.PrefillRequest(batch=_batch(3, _request(5, "Hello", 1, 1))), timeout=120)
    (generation,) = response.generations
    assert len(generation.tokens.ids) == 1
    assert generation.generated_text.generated_tokens == 1
    assert generation.generated_text.finish_reason == pb.FINISH_REASON_LENGTH
    assert not response.HasField("batch")
    assert response.forward_ns > 0 and response.total_ns >= response.forward_ns
    with pytest.raises(grpc.RpcError) as raised:
        stub.Decode(pb.DecodeRequest(batches=[pb.CachedBatch(id=3)]), timeout=120)
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert "Batch ID 3 not found in cache." in raised.value.details()


def test_an_ended_request_stays_listed_until_it_is_filtered(stub: TextGenerationServiceStub) -> None:
    batch = _batch(0, _request(1, "Hello", 1, 1), _request(2, "Good day", 3, 7))
    response = stub.Prefill(pb.PrefillRequest(batch=batch), timeout=120)
    assert response.batch.size == 2 and list(response.batch.request_ids) == [1, 2]
    assert not response.HasField("columns"), "a stock router knows no columns"
    filtered = stub.FilterBatch(pb.FilterBatchRequest(batch_id=0, request_ids=[2]), timeout=120).batch
    assert (filtered.id, filtered.size, list(filtered.request_ids)) == (0, 1, [2])


def test_merged_batches(stub: TextGenerationServiceStub) -> None:
    a, b = _batch(10, _request(1, "Hello", 5, 1)), _batch(11, _request(2, "Good day", 5, 7))
    alone = {**_run_out(stub, a), **_run_out(stub, b)}
    first = stub.Prefill(pb.PrefillRequest(batch=a), timeout=120)
    second = stub.Prefill(pb.PrefillRequest(batch=b), timeout=120)
    merged = stub.Decode(pb.DecodeRequest(batches=[first.batch, second.batch]), timeout=120)
    assert merged.batch.id == 10 and list(merged.batch.request_ids) == [1, 2]
    assert merged.HasField("concat_ns")
    tokens = {g.request_id: list(g.tokens.ids) for r in (first, second) for g in r.generations}
    for generation in merged.generations:
        tokens[generation.request_id].extend(generation.tokens.ids)
    assert tokens == {i: ids[:2] for i, ids in alone.items()}
    with pytest.raises(grpc.RpcError, match="Batch ID 11 not found"):
        stub.Decode(pb.DecodeRequest(batches=[pb.CachedBatch(id=11)]), timeout=120)


def test_a_liveness_probe_changes_nobody(stub: TextGenerationServiceStub) -> None:
    alone = _run_out(stub, _batch(1, _request(1, "The quick brown fox", 8, 1)))
    probe = _request(MAX_UINT64, "liveness", 1)
    probe.truncate, probe.add_special_tokens = 1, False
    probe.blocks.append(0)
    probe.slots.append(0)
    response = stub.Prefill(pb.PrefillRequest(batch=_batch(2, _request(1, "The quick brown fox", 8, 1))), timeout=120)
    tokens = list(response.generations[0].tokens.ids)
    while response.HasField("batch"):
        answer = stub.Prefill(pb.PrefillRequest(batch=_batch(MAX_UINT64, probe)), timeout=120)
        assert not answer.HasField("batch")
        response = stub.Decode(pb.DecodeRequest(batches=[response.batch]), timeout=120)
        tokens.extend(response.generations[0].tokens.ids)
    assert tokens == alone[1]


def test_errors_answer_internal_and_leave_the_shard_alive(stub: TextGenerationServiceStub) -> None:
    bad = _request(1, "Hello", 4, 1)
    del bad.slots[2:]
    calls = [
        lambda: stub.Decode(pb.DecodeRequest(), timeout=120),
        lambda: stub.FilterBatch(pb.FilterBatchRequest(batch_id=4, request_ids=[1]), timeout=120),
        lambda: stub.Prefill(pb.PrefillRequest(batch=_batch(1, bad)), timeout=120),
        lambda: stub.Prefill(pb.PrefillRequest(batch=pb.Batch(id=1)), timeout=120),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert raised.value.details()
    assert len(_run_out(stub, _batch(5, _request(1, "Hello", 4, 1)))[1]) == 4


def test_prompt_logprobs_and_top_tokens(stub: TextGenerationServiceStub) -> None:
    request = _request(1, "The quick brown fox", 1, 1)
    request.prefill_logprobs, request.top_n_tokens = True, 3
    (generation,) = stub.Prefill(pb.PrefillRequest(batch=_batch(1, request)), timeout=120).generations
    prompt = generation.prefill_tokens
    assert len(prompt.ids) == len(prompt.logprobs) == len(prompt.texts) and not prompt.is_special
    assert prompt.logprobs[0] != prompt.logprobs[0], "the first token has no logprob"
    assert all(value <= 0 for value in prompt.logprobs[1:])
    (top,) = generation.top_tokens
    assert len(top.ids) >= 3 and list(top.logprobs) == sorted(top.logprobs, reverse=True)


def test_a_prompt_in_chunks(stub: TextGenerationServiceStub) -> None:
    request = _request(1, "The quick brown fox jumps over the lazy dog.", 4, 1)
    request.prefill_logprobs = True
    whole = stub.Prefill(pb.PrefillRequest(batch=_batch(1, request)), timeout=120)
    prompt = whole.generations[0].prefill_tokens
    alone = _run_out(stub, _batch(1, request))[1]
    request.chunk_len = 3
    response = stub.Prefill(pb.PrefillRequest(batch=_batch(1, request)), timeout=120)
    assert not response.generations
    assert response.batch.current_tokens == len(prompt.ids) - 3, "the next chunk takes the rest"
    assert (response.batch.size, list(response.batch.request_ids)) == (1, [1])
    tokens = []
    while response.HasField("batch"):
        response = stub.Decode(pb.DecodeRequest(batches=[response.batch]), timeout=120)
        (generation,) = response.generations
        if not tokens:
            assert list(generation.prefill_tokens.ids) == list(prompt.ids)
            assert generation.prefill_tokens.logprobs[1:] == pytest.approx(prompt.logprobs[1:], abs=1e-4)
        tokens += generation.tokens.ids
        if generation.HasField("generated_text"):
            break
    assert tokens == alone


def test_a_new_batch_joins_the_running_one(stub: TextGenerationServiceStub) -> None:
    a, b = _batch(10, _request(1, "Hello", 5, 1)), _batch(11, _request(2, "Good day", 5, 7))
    alone = {**_run_out(stub, a), **_run_out(stub, b)}
    b.requests[0].chunk_len = 1
    first = stub.Prefill(pb.PrefillRequest(batch=a), timeout=120)
    second = stub.Prefill(pb.PrefillRequest(batch=b, cached_batch=first.batch), timeout=120)
    assert second.batch.id == 10 and list(second.batch.request_ids) == [1, 2]
    assert [g.request_id for g in second.generations] == [1], "the new one has only begun"
    assert second.HasField("concat_ns")
    third = stub.Decode(pb.DecodeRequest(batches=[second.batch]), timeout=120)
    assert [g.request_id for g in third.generations] == [1, 2]
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for generation in (g for r in (first, second, third) for g in r.generations):
        tokens[generation.request_id].extend(generation.tokens.ids)
    assert tokens == {1: alone[1][:3], 2: alone[2][:1]}
    with pytest.raises(grpc.RpcError, match="Batch ID 77 not found"):
        stub.Prefill(pb.PrefillRequest(batch=b, cached_batch=pb.CachedBatch(id=77)), timeout=120)


def test_a_mixed_call_that_cannot_be_read_loses_the_running_batch(stub: TextGenerationServiceStub) -> None:
    """Its rows have not had their step, and the router has been told that the call failed."""
    first = stub.Prefill(pb.PrefillRequest(batch=_batch(10, _request(1, "Hello", 5, 1))), timeout=120)
    image = _request(2, "", 5, 7)
    image.input_chunks.chunks.append(pb.InputChunk(image=pb.Image(data=b"x", mimetype="image/png")))
    with pytest.raises(grpc.RpcError, match="text only"):
        stub.Prefill(pb.PrefillRequest(batch=_batch(11, image), cached_batch=first.batch), timeout=120)
    with pytest.raises(grpc.RpcError, match="Batch ID 10 is gone"):
        stub.Decode(pb.DecodeRequest(batches=[first.batch]), timeout=120)


def test_a_cached_prefix(stub: TextGenerationServiceStub) -> None:
    request = _request(1, "The quick brown fox jumps over the lazy dog. " * 3, 4, 1)
    alone = _run_out(stub, _batch(1, request))
    again = _request(1, request.inputs, 4, 7)
    again.blocks[0] = request.blocks[0]
    again.slots[:BLOCK] = request.slots[:BLOCK]
    again.cache_len = BLOCK
    assert _run_out(stub, _batch(2, again)) == alone


def test_ids_growth_and_resumption_for_a_router_that_knows_them(shard: ShardProcess) -> None:
    """A request that gets its blocks one by one, is preempted in the middle and goes on."""
    stub = shard.stub
    extensions = ["run_ahead", "row_errors", "token_ids", "grow"]
    _warm_up(stub, extensions)
    numbers = itertools.count(500)
    stub.ClearCache(pb.ClearCacheRequest(sequence=next(numbers)), timeout=120)

    def run(request: pb.Request, last: int = 99) -> list[int]:
        blocks = iter(range(20, 30))
        message = pb.PrefillRequest(batch=_batch(0, request), sequence=next(numbers))
        response = stub.Prefill(message, timeout=120)
        tokens = list(response.generations[0].tokens.ids)
        written, covered = len(request.input_ids) + len(request.resume_ids), len(request.slots)
        while response.HasField("batch") and len(tokens) < last:
            growth = []
            if written == covered:
                growth.append(pb.BlockGrowth(request_id=request.id, blocks=[next(blocks)]))
                covered += BLOCK
            written += 1
            message = pb.DecodeRequest(batches=[response.batch], sequence=next(numbers), growth=growth)
            response = stub.Decode(message, timeout=120)
            (generation,) = response.generations
            assert not generation.HasField("error"), generation.error
            tokens += generation.tokens.ids
        return tokens

    def request(num_blocks: int) -> pb.Request:
        made = _request(4, "", 40, 1)
        del made.blocks[num_blocks:], made.slots[num_blocks * BLOCK :]
        made.input_ids.extend(range(20, 40))
        return made

    try:
        whole = run(request(6))
        assert len(whole) == 40
        assert run(request(2)) == whole
        for count in (1, 12, 13, 39):
            stub.ClearCache(pb.ClearCacheRequest(id=0, sequence=next(numbers)), timeout=120)
            first = run(request(2), last=count)
            stub.ClearCache(pb.ClearCacheRequest(id=0, sequence=next(numbers)), timeout=120)
            again = request(4)
            again.resume_ids.extend(first)
            assert first + run(again) == whole
        refused = request(2)
        refused.input_ids.append(10**6)
        message = pb.PrefillRequest(batch=_batch(0, refused), sequence=next(numbers))
        (generation,) = stub.Prefill(message, timeout=120).generations
        assert "outside the model's" in generation.error
    finally:
        _warm_up(stub)


def test_a_shard_without_chunking_says_so_and_refuses_chunks(model: Path, tmp_path: Path) -> None:
    process = ShardProcess(model, tmp_path / "s", PREFILL_CHUNKING="0", PREFIX_CACHING="false")
    try:
        process.wait_ready()
        info = process.stub.Info(pb.InfoRequest(), timeout=120)
        assert (info.support_chunking, info.use_prefix_caching) == (False, False)
        assert _warm_up(process.stub).max_total_tokens == 512
        request = _request(1, "The quick brown fox", 4, 1)
        first = process.stub.Prefill(pb.PrefillRequest(batch=_batch(1, request)), timeout=120)
        other = _batch(2, _request(2, "Hello", 2, 7))
        with pytest.raises(grpc.RpcError, match="does not chunk"):
            process.stub.Prefill(pb.PrefillRequest(batch=other, cached_batch=first.batch), timeout=120)
        other.requests[0].chunk_len = 1
        with pytest.raises(grpc.RpcError, match="does not chunk"):
            process.stub.Prefill(pb.PrefillRequest(batch=other), timeout=120)
        assert process.stub.Decode(pb.DecodeRequest(batches=[first.batch]), timeout=120).generations
    finally:
        process.stop()


def test_two_ranks_share_the_answers(model: Path, tmp_path: Path, shard: ShardProcess) -> None:
    port = free_port()
    ranks = [ShardProcess(model, tmp_path / "s", rank, 2, port) for rank in (0, 1)]
    batch = _batch(0, *(_request(i, text, 6, 1 + 6 * i) for i, text in enumerate(["Hello", "Good day", "Bye"])))
    shard.stub.ClearCache(pb.ClearCacheRequest(), timeout=120)
    alone = _run_out(shard.stub, batch)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda r: r.wait_ready(), ranks))
            assert len(ranks[0].stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=120).urls) == 2
            list(pool.map(lambda r: _warm_up(r.stub), ranks))
            answers = list(pool.map(lambda r: _run_out(r.stub, batch), ranks))
    finally:
        for rank in ranks:
            rank.stop()
    for request_id, tokens in alone.items():
        assert answers[request_id % 2][request_id] == tokens
        assert answers[1 - request_id % 2][request_id] == []


def test_sigterm_ends_the_shard_and_its_socket(model: Path, tmp_path: Path) -> None:
    process = ShardProcess(model, tmp_path / "s")
    process.wait_ready()
    assert process.stop() == 0
    assert not process.socket.exists()


@pytest.mark.long
def test_a_dead_socket_is_replaced_and_a_live_one_is_not(model: Path, tmp_path: Path, shard: ShardProcess) -> None:
    first = ShardProcess(model, tmp_path / "s")
    first.wait_ready()
    first.process.kill()
    first.process.wait(30)
    assert first.socket.exists(), "a killed server leaves its socket"
    second = ShardProcess(model, tmp_path / "s")
    second.wait_ready()
    third = ShardProcess(model, tmp_path / "s")
    assert third.process.wait(60) == 1
    second.stub.Health(pb.HealthRequest(), timeout=120)
    second.stop()
