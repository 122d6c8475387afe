"""What `inferplane serve` takes of the machine's memory, ready and under load, over all of its processes.

    python benchmarks/cpu/memory.py [--model M] [--parts] [--out FILE] [more options of `inferplane serve`]

Loads follow one another in one server: 64 requests of 128 tokens in and 64 out at once, a prompt of 2,000 tokens, and
32 requests whose first 1,000 tokens are alike. The figure is resident memory in MB (1e6 bytes): pages that the
processes share count once. The peak of each load is the most that was seen, some ten times a second.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

INTERVAL_S = 0.05
READY_S = 300


class Server:
    """One of `inferplane serve`, from its start to its end."""

    def __init__(self, options: list[str]) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
        serve = [sys.executable, "-m", "inferplane.cli.main", "serve", "--port", str(self._port), *options]
        serve += ["--served-model-name", "m"]
        self._process = subprocess.Popen(serve)

    def wait_ready(self) -> None:
        for _ in range(int(READY_S / INTERVAL_S)):
            if self._process.poll() is not None:
                raise SystemExit(f"the server ended with exit status {self._process.returncode}")
            try:
                if self._ask("GET", "/health") == 200:
                    return
            except OSError:
                pass
            time.sleep(INTERVAL_S)
        raise SystemExit(f"the server was not ready after {READY_S} s")

    def complete(self, prompt: list[int], num_tokens: int) -> None:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        status = self._ask("POST", "/v1/completions", body)
        if status != 200:
            raise SystemExit(f"the server answered a request with status {status}")

    def _ask(self, method: str, path: str, body: object = None) -> int:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=READY_S)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    def processes(self) -> list[int]:
        found = [self._process.pid]
        for process in found:  # grows meanwhile
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        return found

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def held_bytes(processes: list[int]) -> Counter[str]:
    """Of several processes together, by file or by what the system calls it. Pages that they share count once, and
    those of files that others on the machine have mapped too count in full."""
    sizes: Counter[str] = Counter()
    files: defaultdict[str, Counter[int]] = defaultdict(Counter)
    """Shared bytes of each file by process."""
    for process in processes:
        name, is_file = "", False
        for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
            kind, *rest = line.split()
            if kind in ("Private_Dirty:", "Private_Clean:"):
                sizes[name] += int(rest[0]) * 1024
            elif kind in ("Shared_Dirty:", "Shared_Clean:") and is_file:
                files[name][process] += int(rest[0]) * 1024
            elif not kind.endswith(":"):
                name = Path(rest[4]).name if len(rest) > 4 else "anonymous"
                is_file = len(rest) > 4
    for name, shared in files.items():
        sizes[name] += max(shared.values())
    return sizes


class Peak:
    """The most memory that the server takes while it lives."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._done = threading.Event()
        self.bytes = 0
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self.bytes = max(self.bytes, held_bytes(self._server.processes()).total())


def loads() -> dict[str, list[tuple[list[int], int]]]:
    """For each load its prompts, with the tokens that each is to be answered by."""
    rng = random.Random(0)

    def draw(num: int) -> list[int]:
        return [rng.randrange(1000, 20000) for _ in range(num)]

    shared = draw(1000)
    return {
        "64x128+64": [(draw(128), 64) for _ in range(64)],
        "2000+1": [(draw(2000), 1)],
        "32x(1000 shared + 32)+16": [(shared + draw(32), 16) for _ in range(32)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the demo model without it")
    parser.add_argument(
        "--parts", action="store_true", help="also what the memory of each process is, at the end"
    )
    parser.add_argument("--out", type=Path, help="JSON lines to write")
    args, more = parser.parse_known_args()
    server = Server([*([args.model] if args.model else []), *more])
    rows = []

    def report(case: str, num_bytes: int) -> None:
        rows.append({"case": f"memory_{case}", "held_MB": round(num_bytes / 1e6, 1)})
        print(json.dumps(rows[-1]), flush=True)

    try:
        server.wait_ready()
        server.complete([1, 2, 3], 4)
        report("ready", held_bytes(server.processes()).total())
        for case, requests in loads().items():
            with Peak(server) as peak, ThreadPoolExecutor(len(requests)) as pool:
                list(pool.map(server.complete, *zip(*requests)))
            report(case, peak.bytes)
        report("after", held_bytes(server.processes()).total())
        for process in server.processes() if args.parts else []:
            largest = held_bytes([process]).most_common(12)
            print(process, {name: round(size / 1e6, 1) for name, size in largest})
    finally:
        server.stop()
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
