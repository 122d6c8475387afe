"""A server on dummy weights under load: many streams at once, and what their callers saw.

    python3 benchmarks/h200/load.py --model llama-8b --device cuda

Starts ``inferplane serve``, waits until it is ready, runs ``inferplane bench serve`` on it, and ends it. Prints the
seconds until it was ready and the load's figures, each as a line for the driver's table.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import shapes

INFERPLANE = [sys.executable, "-m", "inferplane.cli.main"]
STOP_S = 10.0
POLL_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-8b", choices=list(shapes.SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-requests", type=int, default=1024)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--ready-s", type=float, default=60.0, help="most seconds until the server is ready")
    parser.add_argument("--load-s", type=float, default=45.0, help="most seconds of the load")
    args, engine = parser.parse_known_args()
    folder = shapes.write_folder(args.model, Path(tempfile.mkdtemp()))
    port = free_port()
    started = time.monotonic()
    server = subprocess.Popen(
        [*INFERPLANE, "serve", str(folder), "--port", str(port), *server_options(args, engine)]
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(server, url, started + args.ready_s)
        print(json.dumps({"case": "ready", "seconds": round(time.monotonic() - started, 2)}), flush=True)
        subprocess.run(
            [*INFERPLANE, "bench", "serve", *load_options(args, url)], check=True, timeout=args.load_s
        )
    finally:
        end(server)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_options(args: argparse.Namespace, engine: list[str]) -> list[str]:
    """``engine`` comes last, so that it overrides."""
    return [
        *("--device", args.device, "--load-format", "dummy", "--max-model-len", "8192"),
        *("--max-num-seqs", str(args.concurrency), "--no-prefix-caching", "--no-access-log"),
        *engine,
    ]  # fmt: skip


def load_options(args: argparse.Namespace, url: str) -> list[str]:
    shape = shapes.SHAPES[args.model]
    return [
        *("--base-url", url, "--token-ids", "--vocab-size", str(shape["vocab_size"]), "--json"),
        *("--num-requests", str(args.num_requests), "--concurrency", str(args.concurrency)),
        *("--input-len", str(args.input_len), "--output-len", str(args.output_len)),
        *("--num-warmup", str(min(32, args.concurrency)), "--device", args.device, "--dtype", shape["torch_dtype"]),
    ]  # fmt: skip


def wait_ready(server: subprocess.Popen[bytes], url: str, deadline: float) -> None:
    """Raises `RuntimeError` when it ends, or takes too long."""
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with exit status {server.returncode}")
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise RuntimeError("the server was not ready in time")


def end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
