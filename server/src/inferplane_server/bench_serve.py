"""``inferplane bench serve``: streaming load on a running OpenAI-compatible server, and what its callers saw of it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import click

from inferplane.bench.report import Measurement, emit
from inferplane.cli.options import GroupedCommand, GroupedOption
from inferplane_server.bench_trace import Trace

# Words that most vocabularies hold as one token each, so that a prompt has about as many tokens as words.
_WORD_LIST = """
time people way water day man world life hand part child eye woman place work week case point number group problem
fact home room mother area money story month lot right study book word business issue side kind head house service
friend father power hour game line end law car city name team minute idea body back parent face level office door
health person art war history party result change morning reason research girl guy moment air teacher force education
"""
WORDS = _WORD_LIST.split()


class BenchError(RuntimeError):
    """The server cannot be measured; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent, and how fast."""

    base_url: str
    model: str
    is_chat: bool
    prompts: Sequence[str | list[int]]
    """Texts or token ids; ids only without ``is_chat``."""
    output_len: int
    concurrency: int | None
    """Requests in flight at any time; None with a rate."""
    rate: float | None
    """Requests a second on average, at random moments (a Poisson process); None sends the next when one is done."""
    api_key: str | None
    extra_body: dict[str, Any]
    timeout_s: float
    seed: int


async def run_load(load: Load) -> tuple[list[Trace], float]:
    """Traces of all requests, and the seconds from the first one sent to the last one ended."""
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    async with aiohttp.ClientSession(
        load.base_url,
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=load.timeout_s),
        read_bufsize=2**20,
    ) as session:
        started_s = time.perf_counter()
        if load.rate is not None:
            traces = await _send_at_rate(session, load, load.rate)
        else:
            traces = await _send_in_turn(session, load)
        return traces, time.perf_counter() - started_s


async def _send_at_rate(session: aiohttp.ClientSession, load: Load, rate: float) -> list[Trace]:
    """Open loop: a slow server does not slow the callers down."""
    chance = random.Random(load.seed)
    tasks = []
    due_s = time.perf_counter()
    for prompt in load.prompts:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(_send(session, load, prompt)))
        due_s += chance.expovariate(rate)
    return await asyncio.gather(*tasks)


async def _send_in_turn(session: aiohttp.ClientSession, load: Load) -> list[Trace]:
    """Closed loop: each of the callers sends its next request when its last one has ended."""
    remaining = iter(load.prompts)
    traces: list[Trace] = []

    async def caller() -> None:
        for prompt in remaining:
            traces.append(await _send(session, load, prompt))

    await asyncio.gather(*(caller() for _ in range(load.concurrency or 1)))
    return traces


async def _send(session: aiohttp.ClientSession, load: Load, prompt: str | list[int]) -> Trace:
    body: dict[str, Any] = {
        "model": load.model,
        "max_tokens": load.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **load.extra_body,
    }
    if load.is_chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if isinstance(prompt, list):
        body["return_token_ids"] = True  # a server without a tokenizer has nothing else to show
    route = "/v1/chat/completions" if load.is_chat else "/v1/completions"
    trace = Trace(time.perf_counter())
    try:
        async with session.post(route, json=body) as response:
            if response.status == 200:
                await trace.follow(response.content.iter_any())
            else:
                trace.error = f"{response.status}: {(await response.text())[:300]}"
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        trace.error = f"{type(error).__name__}: {error}"
    trace.ended_s = time.perf_counter()
    if trace.error is None and not trace.token_times_s:
        trace.error = "the stream carried no text"
        if isinstance(prompt, list):
            trace.error += " and no token ids"
    return trace


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By linear interpolation between the two nearest ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(
    load: Load, traces: Sequence[Trace], seconds: float, input_len: int, *, labels: dict[str, str]
) -> Measurement:
    good = [trace for trace in traces if trace.error is None]
    if not good:
        raise BenchError(f"no request succeeded; the first one failed with {traces[0].error}")
    pace = f"c{load.concurrency}" if load.rate is None else f"r{load.rate:g}"
    num_prompt_tokens = sum(trace.num_prompt_tokens for trace in good)
    num_output_tokens = sum(trace.num_output_tokens for trace in good)
    extra: dict[str, Any] = {
        "out_tok_s": round(num_output_tokens / seconds, 1),
        "total_tok_s": round((num_prompt_tokens + num_output_tokens) / seconds, 1),
        "req_s": round(len(good) / seconds, 3),
        "errors": len(traces) - len(good),
        "chunks_per_token": round(sum(len(trace.token_times_s) for trace in good) / num_output_tokens, 3),
    }
    series = {
        "ttft_ms": [trace.ttft_s for trace in good],
        "itl_ms": [gap for trace in good for gap in trace.gaps_s],
        "tpot_ms": [trace.tpot_s for trace in good if trace.num_output_tokens > 1],
        "e2e_ms": [trace.ended_s - trace.started_s for trace in good],
    }
    for name, values in series.items():
        for percent in (50, 90, 99):
            value = percentile(values, percent)
            extra[f"{name}_p{percent}"] = None if value is None else round(value * 1e3, 2)
    if failed := [trace.error for trace in traces if trace.error]:
        extra["first_error"] = failed[0]
    return Measurement(
        engine=labels["engine"],
        model=load.model,
        case=f"serve_{pace}_{len(load.prompts)}x{input_len}+{load.output_len}",
        device=labels["device"],
        dtype=labels["dtype"],
        n=len(good),
        inp=round(num_prompt_tokens / len(good)),
        out=round(num_output_tokens / len(good)),
        seconds=seconds,
        extra=extra,
    )


def random_texts(num: int, num_words: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=num_words)) for _ in range(num)]


def random_token_ids(num: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [chance.choices(range(vocab_size), k=length) for _ in range(num)]


async def first_model(base_url: str, api_key: str | None) -> str:
    """The first name that ``/v1/models`` lists. Raises `BenchError` when the server does not answer."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with (
            aiohttp.ClientSession(base_url, headers=headers) as session,
            session.get("/v1/models") as response,
        ):
            if response.status != 200:
                raise BenchError(
                    f"{base_url}/v1/models answers {response.status}: {(await response.text())[:300]}"
                )
            return (await response.json())["data"][0]["id"]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchError(f"there is no server at {base_url}: {error}") from error


def _option(name: str, *, group: str = "Benchmark", **settings: Any) -> Any:
    return click.option(
        name, cls=GroupedOption, group=group, show_default=settings.get("default") is not None, **settings
    )


@click.command("serve", cls=GroupedCommand)
@_option("--base-url", default="http://127.0.0.1:8000", help="The server to load; it must be running.")
@_option("--model", help="Name of the model. Default: the first one that the server lists.")
@_option("--api-key", envvar="INFERPLANE_API_KEY", help="Key to send.")
@_option("--endpoint", default="completions", type=click.Choice(["completions", "chat"]), help="API to call.")
@_option("--num-requests", default=64, type=click.IntRange(1), help="Requests in all.")
@_option(
    "--concurrency",
    type=click.IntRange(1),
    help="Requests in flight at any time. Default: 8, without --rate.",
)
@_option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Requests a second on average, sent at random moments.",
)
@_option(
    "--input-len",
    default=128,
    type=click.IntRange(1),
    help="Words of each prompt, of about one token each; tokens with --token-ids.",
)
@_option(
    "--token-ids",
    is_flag=True,
    help="Prompts are random token ids, exactly --input-len of them, and answers are counted by token ids: for servers "
    "without a tokenizer.",
)
@_option(
    "--vocab-size",
    default=256,
    type=click.IntRange(1),
    help="The ids of --token-ids are below this one.",
)
@_option("--output-len", default=64, type=click.IntRange(1), help="Output tokens of each.")
@_option("--prompt-seed", default=0, help="Seed of the random prompts and moments.")
@_option("--num-warmup", default=1, type=click.IntRange(0), help="Requests sent before, which do not count.")
@_option("--timeout-s", default=600.0, help="For each request.")
@_option(
    "--extra-body", default='{"ignore_eos": true}', help="JSON object of further fields for each request."
)
@_option("--engine", group="Labels", default="inferplane", help="Name of the engine in the result.")
@_option("--device", group="Labels", default="unknown", help="Name of the device in the result.")
@_option("--dtype", group="Labels", default="unknown", help="Name of the dtype in the result.")
@_option("--json", help="One JSON object a case.", is_flag=True)
def bench_serve_command(**options: Any) -> None:
    """Load a running server with streams and report what its callers saw."""
    if options["concurrency"] and options["rate"]:
        raise click.UsageError(
            "--concurrency and --rate exclude each other: the one waits for answers, the other does not"
        )
    if options["token_ids"] and options["endpoint"] == "chat":
        raise click.UsageError("--token-ids needs --endpoint completions: conversations are text")
    asyncio.run(_bench(options))


async def _bench(options: dict[str, Any]) -> None:
    base_url, api_key, input_len, seed = (
        options[name] for name in ("base_url", "api_key", "input_len", "prompt_seed")
    )
    try:
        extra_body = json.loads(options["extra_body"])
    except ValueError as error:
        raise click.UsageError(f"--extra-body is no JSON: {error}") from error
    common: dict[str, Any] = {
        "base_url": base_url,
        "model": options["model"] or await first_model(base_url, api_key),
        "is_chat": options["endpoint"] == "chat",
        "output_len": options["output_len"],
        "api_key": api_key,
        "extra_body": extra_body,
        "timeout_s": options["timeout_s"],
        "seed": seed,
    }
    # other prompts than those that count, which must not find themselves in a prefix cache
    warm_up = _prompts(options, options["num_warmup"], seed + 1_000_000)
    if warm_up:
        await run_load(Load(prompts=warm_up, concurrency=len(warm_up), rate=None, **common))
    load = Load(
        prompts=_prompts(options, options["num_requests"], seed),
        concurrency=None if options["rate"] else options["concurrency"] or 8,
        rate=options["rate"],
        **common,
    )
    started_s = time.process_time()
    traces, seconds = await run_load(load)
    client_s = time.process_time() - started_s
    labels = {name: options[name] for name in ("engine", "device", "dtype")}
    measurement = summarize(load, traces, seconds, input_len, labels=labels)
    # near to the seconds of the whole, the load was the limit and not the server
    measurement.extra["client_cpu_s"] = round(client_s, 3)
    emit(measurement, options["json"])


def _prompts(options: dict[str, Any], num: int, seed: int) -> Sequence[str | list[int]]:
    if options["token_ids"]:
        return random_token_ids(num, options["input_len"], options["vocab_size"], seed)
    return random_texts(num, options["input_len"], seed)
