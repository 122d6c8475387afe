"""The load generator, against a server whose pace is known."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest
from click.testing import CliRunner

from inferplane_server.bench_serve import (
    BenchError,
    Load,
    bench_serve_command,
    first_model,
    percentile,
    random_texts,
    random_token_ids,
    run_load,
    summarize,
)
from inferplane_server.bench_trace import Trace
from inferplane_server.http_server import HttpServer
from inferplane_server.serving import bind
from inferplane_server.settings import ServerSettings
from scripted_engine import EOS_ID, ScriptedEngine

LABELS = {"engine": "e", "device": "d", "dtype": "t"}


@asynccontextmanager
async def serving(engine, **settings):
    listener = bind("127.0.0.1", 0)
    server = HttpServer(engine, ServerSettings(access_log=False, **settings), listener)
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()
        listener.close()


def load_of(url, **changes):
    defaults = {
        "base_url": url, "model": "fake", "is_chat": False, "prompts": random_texts(12, 5, 0), "output_len": 10,
        "concurrency": 4, "rate": None, "api_key": None, "extra_body": {}, "timeout_s": 30, "seed": 0,
    }  # fmt: skip
    return Load(**{**defaults, **changes})


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("pace", [{}, {"concurrency": None, "rate": 100.0}])
async def test_times_and_counts_are_those_of_the_server(is_chat, pace):
    async with serving(ScriptedEngine(delay_s=0.01)) as url:
        load = load_of(url, is_chat=is_chat, **pace)
        traces, seconds = await run_load(load)
    measured = summarize(load, traces, seconds, 5, labels=LABELS).as_dict()
    assert measured["n"] == 12
    assert measured["errors"] == 0
    assert measured["out"] == 10
    assert measured["out_tok_s"] == pytest.approx(120 / seconds, rel=0.01)
    assert measured["case"] == ("serve_r100_12x5+10" if pace else "serve_c4_12x5+10")
    for name in ("ttft_ms", "itl_ms", "tpot_ms"):
        # nothing is faster than the engine; how much slower depends on what else the machine does
        assert 9.5 <= measured[f"{name}_p50"] < 1000, name
    assert measured["e2e_ms_p50"] >= 100


async def test_closed_loop_keeps_the_concurrency():
    engine = ScriptedEngine(delay_s=0.01)
    most = 0
    original = engine.stats
    async with serving(engine) as url:
        load = load_of(url, concurrency=3)
        import asyncio

        running = asyncio.create_task(run_load(load))
        while not running.done():
            most = max(most, original().num_running)
            await asyncio.sleep(0.002)
    assert most == 3


async def test_failures_are_counted_and_shown():
    async with serving(ScriptedEngine(fail_after=3)) as url:
        load = load_of(url)
        traces, seconds = await run_load(load)
    assert all("planned fault" in trace.error for trace in traces)
    with pytest.raises(BenchError, match="planned fault"):
        summarize(load, traces, seconds, 5, labels=LABELS)
    good = Trace(0.0, [1.0, 2.0], 2.0, 5, 2)
    measured = summarize(load, [good, *traces], 2.0, 5, labels=LABELS).as_dict()
    assert (measured["n"], measured["errors"]) == (1, 12)
    assert "planned fault" in measured["first_error"]


async def test_a_server_that_is_not_there_or_wants_a_key_is_told():
    with pytest.raises(BenchError, match="no server"):
        await first_model("http://127.0.0.1:9", None)
    async with serving(ScriptedEngine(), api_keys=("k",)) as url:
        with pytest.raises(BenchError, match="401"):
            await first_model(url, None)
        assert await first_model(url, "k") == "fake"


def test_percentiles_interpolate():
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([4.0, 1.0, 3.0, 2.0], 100) == 4.0


def test_prompts_repeat_with_their_seed_and_differ_from_each_other():
    texts = random_texts(8, 20, 3)
    assert texts == random_texts(8, 20, 3)
    assert len(set(texts)) == 8
    assert {len(text.split()) for text in texts} == {20}


def test_options_that_exclude_each_other_are_refused():
    result = CliRunner().invoke(bench_serve_command, ["--rate", "1", "--concurrency", "2"])
    assert result.exit_code == 2


async def test_the_command_prints_one_object():
    import asyncio

    async with serving(ScriptedEngine()) as url:
        arguments = [
            "--base-url",
            url,
            "--num-requests",
            "4",
            "--output-len",
            "5",
            "--input-len",
            "4",
            "--json",
        ]
        result = await asyncio.to_thread(CliRunner().invoke, bench_serve_command, arguments)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert {
        "engine",
        "model",
        "case",
        "device",
        "dtype",
        "n",
        "inp",
        "out",
        "seconds",
        "out_tok_s",
        "total_tok_s",
        "commit",
    } <= set(printed)
    assert printed["case"] == "serve_c8_4x4+5"


async def test_token_ids_load_a_server_without_text():
    engine = ScriptedEngine(script=[EOS_ID] * 6)
    async with serving(engine) as url:
        load = load_of(url, prompts=random_token_ids(3, 7, 20, 0), output_len=6)
        traces, seconds = await run_load(load)
    measured = summarize(load, traces, seconds, 7, labels=LABELS).as_dict()
    assert (measured["n"], measured["inp"], measured["out"]) == (3, 7, 6)
    assert [len(trace.token_times_s) for trace in traces] == [6, 6, 6]
    assert sorted(seen["prompt"] for seen in engine.seen) == sorted(load.prompts)
    assert all(0 <= token < 20 for prompt in load.prompts for token in prompt)


def test_token_ids_are_no_conversation():
    result = CliRunner().invoke(bench_serve_command, ["--token-ids", "--endpoint", "chat"])
    assert result.exit_code == 2
    assert "--token-ids" in result.output


async def read_in_pieces(data: bytes, size: int):
    for start in range(0, len(data), size):
        yield data[start : start + size]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_trace_counts_chunks_with_tokens_wherever_reads_end(size):
    """Spaces as other servers write them; text that looks like a chunk is only text."""
    events = [
        b'{"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}',
        b'{"choices": [{"delta": {"content": "a"}}]}',
        b'{"choices":[{"text":"\\"usage\\":{\\"error\\":{"}]}',
        b'{"choices":[{"text":"","token_ids":[3]}]}',
        b'{"choices":[{"text":"","token_ids":[],"finish_reason":"length"}]}',
        b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":5}}',
        b"[DONE]",
    ]
    stream = b": comment\n\n" + b"".join(b"data: " + event + b"\n\n" for event in events)
    trace = Trace(0.0)
    await trace.follow(read_in_pieces(stream, size))
    assert trace.error is None
    assert len(trace.token_times_s) == 3
    assert (trace.num_prompt_tokens, trace.num_output_tokens) == (4, 5)


@pytest.mark.parametrize("error", [b'{"error":{"message":"it broke"}}', b'{"error": "it broke"}'])
async def test_a_trace_says_what_broke_the_stream(error):
    trace = Trace(0.0)
    await trace.follow(read_in_pieces(b"data: " + error + b"\n\n", 1000))
    assert trace.error == "it broke"
    trace = Trace(0.0)
    await trace.follow(read_in_pieces(b'data: {"choices":[{"text":"a"}]}\n\n', 1000))
    assert trace.error == "the stream ended without [DONE]"
