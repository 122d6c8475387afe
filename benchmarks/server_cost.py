"""What the server's process spends on each streamed token: the real server over HTTP, before an engine that computes
nothing (`paced_engine.py`).

    python benchmarks/server_cost.py [--streams 512] [--tokens 128] [--endpoint chat] [--profile FILE] [--json]

The engine emits one token for every stream at each step of ``--step-ms``, as a device would. The load comes from
``inferplane bench serve``, in a process of its own. Times are of the processor, so that they mean something on a busy
machine; ``chunks_per_token`` below 1 tells that the server fell behind and merged tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from inferplane.config import EngineArgs
from inferplane.engine.async_engine import AsyncEngine
from inferplane.engine.spawn import EngineChild
from inferplane_server.http_server import HttpServer
from inferplane_server.serving import bind, event_loop_factory
from inferplane_server.settings import ServerSettings


async def measure(engine: AsyncEngine, args: argparse.Namespace) -> dict[str, Any]:
    listener = bind("127.0.0.1", 0)
    server = HttpServer(engine, ServerSettings(access_log=False), listener)
    await server.start()
    try:
        await engine.wait_ready()
        await server.prepare_chat()
        profiler = cProfile.Profile() if args.profile else None
        started_s = time.process_time()
        with profiler or nullcontext():
            load = await run_load(server.url, args)
        server_s = time.process_time() - started_s
        if profiler:
            with args.profile.open("w") as file:
                statistics = pstats.Stats(profiler, stream=file)
                statistics.sort_stats("tottime").print_stats(60)
                statistics.sort_stats("cumulative").print_stats(60)
    finally:
        await server.stop()
        listener.close()
    num_tokens = load["n"] * load["out"]
    return {
        "case": f"server_cost_{args.endpoint}_{args.streams}x{args.input_len}+{args.tokens}",
        "server_us_per_token": round(server_s / num_tokens * 1e6, 1),
        "client_us_per_token": round(load["client_cpu_s"] / num_tokens * 1e6, 1),
        "chunks_per_token": load["chunks_per_token"],
        "out_tok_s": load["out_tok_s"],
        "itl_ms_p50": load["itl_ms_p50"],
        "errors": load["errors"],
    }


async def run_load(url: str, args: argparse.Namespace) -> dict[str, Any]:
    options = ["--endpoint", "chat"] if args.endpoint == "chat" else []
    if args.endpoint == "token-ids":
        options = ["--token-ids"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "inferplane.cli.main", "bench", "serve", "--base-url", url, "--json", *options),
        *("--num-requests", str(args.streams), "--concurrency", str(args.streams), "--num-warmup", "0"),
        *("--input-len", str(args.input_len), "--output-len", str(args.tokens)),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"the load ended with exit status {process.returncode}")
    return json.loads(output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--input-len", type=int, default=32, help="words of each prompt")
    parser.add_argument("--step-ms", type=float, default=100.0, help="from one token of a stream to the next")
    parser.add_argument("--endpoint", default="completions", choices=["completions", "chat", "token-ids"])
    parser.add_argument(
        "--profile", type=Path, help="file for the cost of each function, which slows the rest"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["PACED_ENGINE_STEP_S"] = str(args.step_ms / 1e3)
    os.environ["PYTHONPATH"] = (
        f"{Path(__file__).resolve().parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    engine = AsyncEngine.launch(EngineArgs(), EngineChild("paced_engine"))
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        try:
            result = runner.run(measure(engine, args))
        finally:
            runner.run(engine.shutdown())
    print(json.dumps(result) if args.json else "  ".join(f"{key} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
