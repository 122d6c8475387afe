"""What can be used is documented, and what is documented can be used."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import click
import pytest

import reference_text
from repository import ROOT, shown, source_files, text_files

DOCS = ROOT / "docs"
COMMANDS = {
    "inferplane serve",
    "inferplane chat",
    "inferplane bench throughput",
    "inferplane bench latency",
    "inferplane bench serve",
    "inferplane bench startup",
    "inferplane conform",
    "inferplane new-platform",
    "inferplane plugins list",
    "inferplane plugins doctor",
    "inferplane plugins explain",
    "inferplane models list",
    "inferplane models pull",
    "inferplane collect-env",
}


def is_sentence(text: str | None) -> bool:
    return bool(text) and len(text.split()) >= 2 and text.rstrip().endswith((".", "?"))


def commands() -> dict[str, click.Command]:
    return {name: command for name, command, _ in reference_text.commands()}


def console_lines() -> Iterator[tuple[Path, str]]:
    """Every line that README and documentation tell the reader to type."""
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *text_files("docs")]:
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8").replace("\\\n", " ")
            yield from ((path, line) for line in re.findall(r"^\$ (.+)$", text, re.M))


# --- hooks


@pytest.mark.parametrize("name", reference_text.hook_functions())
def test_a_hook_is_typed_documented_and_on_its_page(name: str):
    hook: Callable[..., Any] = reference_text.hook_functions()[name]
    assert is_sentence(inspect.getdoc(hook))
    signature = inspect.signature(hook)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())
    assert f"\n## {name}\n" in "\n" + reference_text.hooks_markdown()


def test_the_hooks_page_is_generated():
    assert "```{hooks}\n```" in (DOCS / "hooks.md").read_text(encoding="utf-8")
    assert len(reference_text.hook_functions()) >= 10


# --- command line


def test_the_promised_commands_exist():
    assert commands().keys() >= COMMANDS


def test_every_command_and_option_is_explained():
    page = reference_text.command_line_markdown()
    for name, command in commands().items():
        assert is_sentence(command.help), f"{name} has no help"
        assert f"## {name}\n" in page
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert is_sentence(option.help), f"{name} {option.opts[0]}: help is {option.help!r}"
                assert f"`{option.opts[0]}`" in page


def test_the_command_line_page_is_generated():
    assert "```{command-line}\n```" in (DOCS / "command-line.md").read_text(encoding="utf-8")


def test_serve_takes_every_engine_setting():
    from inferplane.config import EngineArgs

    taken = {parameter.name for parameter in commands()["inferplane serve"].params}
    assert {field.name for field in dataclasses.fields(EngineArgs)} - {"plugin_options"} <= taken


def test_commands_in_the_documentation_exist():
    known = commands()
    lines = [(path, line) for path, line in console_lines() if line.startswith("inferplane ")]
    assert len(lines) > 5
    for path, line in lines:
        words = shlex.split(line)
        name = max((n for n in known if words[: len(n.split())] == n.split()), key=len, default="")
        assert name.count(" ") >= 1, f"{shown(path)} says {line!r}, which is no command"
        options = {
            flag for parameter in known[name].params for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= options | {"--help"}, f"{shown(path)} says {line!r}; {name} has no {used - options}"


def test_options_named_in_the_documentation_exist():
    options = {
        flag for command in commands().values() for parameter in command.params for flag in parameter.opts
    }
    for path in [ROOT / "README.md", *text_files("docs")]:
        if path.suffix == ".md":
            named = re.findall(r"`(--[a-z][a-z-]+)", path.read_text(encoding="utf-8"))
            unknown = set(named) - options - {"--no-deps", "--help"}
            assert not unknown, f"{shown(path)} names options that do not exist: {unknown}"


# --- HTTP


def app() -> Any:
    from inferplane_server.app import create_app
    from inferplane_server.settings import ServerSettings

    return create_app(MagicMock(), ServerSettings(served_model_names=("model",)))


def http_page() -> str:
    return (DOCS / "http-api.md").read_text(encoding="utf-8")


def test_the_http_page_lists_exactly_the_endpoints():
    documented = set(re.findall(r"^\| `([A-Z]+ /\S*)` \|", http_page(), re.M))
    paths = app().openapi()["paths"]
    assert documented == {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


def test_the_http_page_explains_every_field():
    from inferplane_server.protocol.chat import ChatRequest
    from inferplane_server.protocol.completions import CompletionRequest
    from inferplane_server.protocol.pooling import (
        ClassifyRequest,
        EmbeddingRequest,
        RerankRequest,
        ScoreRequest,
    )
    from inferplane_server.protocol.sampling import StreamOptions

    code = " ".join(re.findall(r"`([^`\n]+)`", http_page()))
    documented = set(re.findall(r"[a-z_][a-z_0-9]*", code))
    pooling = (ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest)
    for request in (ChatRequest, CompletionRequest, StreamOptions, *pooling):
        assert not request.model_fields.keys() - documented


def test_the_http_page_lists_exactly_the_metrics():
    from msgspec.structs import replace

    from inferplane.engine.stats import EngineStats
    from inferplane_server.metrics import ServerMetrics

    stats = replace(EngineStats.at_start(), expert_tokens={"layers.0.gate": [1]})
    exposition = ServerMetrics(lambda: stats).render().decode()
    exported = set(re.findall(r"^# TYPE (inferplane_\w+)", exposition, re.M))
    documented = set(re.findall(r"`(inferplane_\w+)`", http_page()))
    assert documented == {name for name in exported if not name.endswith("_created")}


# --- settings and environment


def test_every_engine_setting_is_explained_and_grouped():
    from inferplane.config import EngineArgs

    page = reference_text.engine_options_markdown()
    for field in dataclasses.fields(EngineArgs):
        if field.name not in ("model", "plugin_options"):
            assert is_sentence(field.metadata.get("help")), f"{field.name} has no help"
            assert f"`{field.name}`" in page


def test_environment_variables_are_declared_once_and_all_are_read():
    from inferplane.config.environment import ENVIRONMENT

    registry = ROOT / "core/src/inferplane/config/environment.py"
    elsewhere = [path.read_text(encoding="utf-8") for path in source_files() if path != registry]
    named = {name for text in elsewhere for name in re.findall(r"\bINFERPLANE_[A-Z_]*[A-Z]\b", text)}
    assert named == set(ENVIRONMENT)
    page = reference_text.environment_markdown()
    for variable in ENVIRONMENT.values():
        assert variable.name.startswith("INFERPLANE_")
        assert is_sentence(variable.help)
        assert f"`{variable.name}`" in page


# --- the rest


def test_change_fragments_are_named_as_towncrier_wants():
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
    types = "|".join(entry["directory"] for entry in settings["type"])
    fragments = [path.name for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    assert not [name for name in fragments if not re.fullmatch(rf"(\d+|\+[\w-]+)\.({types})\.md", name)]


def test_decisions_are_numbered_in_order():
    names = sorted(path.name for path in (DOCS / "adr").glob("[0-9]*.md"))
    assert [int(name[:4]) for name in names] == list(range(len(names)))


def test_links_between_files_of_the_repository_lead_somewhere():
    broken = []
    for path in text_files():
        if path.suffix == ".md":
            for target in re.findall(r"\]\((?!https?:|#)([^)\s#]+)", path.read_text(encoding="utf-8")):
                if not (path.parent / target).exists():
                    broken.append(f"{shown(path)}: {target}")
    assert not broken
