"""A server beside a plugin that fails, on a platform that lacks a feature: what operator and callers are told."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server_process import ServerProcess
from toy_plugins import ToyIndex

pytestmark = pytest.mark.timeout(400)

BROKEN = "raise ImportError('libglow.so.3: cannot open shared object file')"
PLAIN = """
from inferplane.api import *
MANIFEST = PluginManifest(name="plain", api=API_VERSION, provides=("platform",))
@hookimpl
def probe_devices(): return Supported("plain", 1, (DeviceDescriptor("plain", 0, "plain card", 1 << 30),))
@hookimpl
def create_platform(device):
    if device.platform != "plain": return None
    from inferplane.reference.platform import ReferencePlatform
    class Plain(ReferencePlatform):
        def unsupported_sampling(self):
            return {"frequency_penalty": "the card counts no tokens", "logprobs": "the card keeps no probabilities"}
    return Plain()
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of a process that has both plugins."""
    site = tmp_path / "site"
    site.mkdir()
    toys = ToyIndex(site, monkeypatch)
    toys.install("glow", BROKEN, version="4.5.6")
    toys.install("plain", PLAIN)
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def post(url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {
        "model": "m",
        "prompt": "You may",
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_it_warns_serves_and_refuses(environment: dict[str, str], tiny_model: Callable[[str], Path]) -> None:
    options = (
        "--device",
        "plain",
        "--served-model-name",
        "m",
        "--kv-cache-bytes",
        "16MiB",
        "--num-threads",
        "1",
    )
    with ServerProcess(tiny_model("llama"), *options, environment=environment) as server:
        server.wait_ready()
        for part in ("plugin 'glow' (toy-glow 4.5.6) failed and is not used", "Traceback", "libglow.so.3"):
            assert part in server.log
        status, answer = post(server.url)
        assert status == 200
        for name, value, reason in (
            ("frequency_penalty", 0.5, "the card counts no tokens"),
            ("logprobs", 1, "the card keeps no probabilities"),
        ):
            status, refusal = post(server.url, **{name: value})
            assert status == 400
            assert refusal["error"]["param"] == name
            assert f"{name} cannot be served here: {reason}" in refusal["error"]["message"]
        status, other = post(server.url, frequency_penalty=0.0)
        assert (status, other["choices"][0]["text"]) == (200, answer["choices"][0]["text"])


def test_it_does_not_start_on_a_device_that_failed(
    environment: dict[str, str], tiny_model: Callable[[str], Path]
) -> None:
    with ServerProcess(tiny_model("llama"), "--device", "glow", environment=environment) as server:
        assert server.wait() == 1
        last = server.log.splitlines()[-1]
    assert last.startswith("error: --device asks for plugin 'glow' (toy-glow 4.5.6), which failed")
    assert last.endswith("ImportError: libglow.so.3: cannot open shared object file")
