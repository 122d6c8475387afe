"""``inferplane serve`` before anything is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from inferplane_server.cli import serve


@pytest.fixture
def settings_of(monkeypatch):
    """Runs the command up to the point where it would serve, and returns what it would serve with."""
    found = {}

    def catch(engine_args, settings):
        found.update(engine_args=engine_args, settings=settings)
        return 0

    monkeypatch.setattr("inferplane_server.serving.serve_until_stopped", catch)
    monkeypatch.delenv("INFERPLANE_API_KEY", raising=False)

    def run(*arguments, env=None):
        found.clear()
        result = CliRunner().invoke(serve, arguments, env=env)
        return result, found.get("settings"), found.get("engine_args")

    return run


def test_defaults_are_loopback_and_no_key(settings_of):
    result, settings, engine_args = settings_of()
    assert result.exit_code == 0
    assert (settings.host, settings.port, settings.api_keys) == ("127.0.0.1", 8000, ())
    assert engine_args.model is None


def test_options_reach_their_settings(settings_of):
    _, settings, engine_args = settings_of(
        "some/model", "--served-model-name", "a", "--served-model-name", "b", "--port", "0", "--max-body-bytes", "2MiB",
        "--drain-timeout-s", "1.5", "--allow-origin", "*", "--no-access-log", "--max-num-seqs", "7",
        "--chat-template", "{{ x }}",
    )  # fmt: skip
    assert settings.served_model_names == ("a", "b")
    assert settings.max_body_bytes == 2 * 2**20
    assert settings.drain_timeout_s == 1.5
    assert settings.allow_origins == ("*",)
    assert settings.chat_template == "{{ x }}"
    assert not settings.access_log
    assert (engine_args.model, engine_args.max_num_seqs) == ("some/model", 7)


def test_keys_come_from_options_and_environment(settings_of):
    _, settings, _ = settings_of("--api-key", "a", "--api-key", "b", env={"INFERPLANE_API_KEY": "c"})
    assert settings.api_keys == ("a", "b", "c")


@pytest.mark.parametrize(
    ("arguments", "env"),
    [((), {"INFERPLANE_API_KEY": ""}), (("--api-key", ""), None), (("--api-key", " "), None)],
)
def test_an_empty_key_is_refused_and_not_an_open_server(settings_of, arguments, env):
    result, settings, _ = settings_of(*arguments, env=env)
    assert result.exit_code == 2
    assert settings is None


@pytest.mark.parametrize(
    "arguments",
    [
        ("--port", "70000"),
        ("--port", "x"),
        ("--drain-timeout-s", "-1"),
        ("--max-body-bytes", "lots"),
        ("--nope",),
        ("--served-model-name", ""),
        ("--max-body-bytes", "0"),
        ("--drain-timeout-s", "nan"),
        ("--chat-template", "{% if %}"),
    ],
)
def test_impossible_options_are_refused(settings_of, arguments):
    result, settings, _ = settings_of(*arguments)
    assert result.exit_code == 2
    assert settings is None


def test_a_template_file_is_read(settings_of, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}")
    _, settings, _ = settings_of("--chat-template", str(path))
    assert settings.chat_template == "{{ messages }}"


def test_a_missing_template_file_is_named(settings_of):
    result, settings, _ = settings_of("--chat-template", "nowhere.jinja")
    assert "nowhere.jinja" in str(result.exception)
    assert settings is None


@pytest.mark.parametrize("module", ["app", "http_server", "serving", "cli", "bench_serve"])
def test_the_front_end_imports_neither_torch_nor_transformers(module):
    code = (
        f"import sys, inferplane_server.{module}; "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_plugin_module_imports_nothing_heavy():
    code = (
        "import sys, inferplane_server.plugin; "
        "print([m for m in ('torch', 'fastapi', 'pydantic', 'uvicorn', 'aiohttp', 'msgspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
