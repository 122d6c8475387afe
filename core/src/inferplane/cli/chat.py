"""``inferplane chat``: one answer on stdout, or a conversation in a terminal."""

from __future__ import annotations

import sys
from typing import Any

import click

from inferplane.cli.options import GroupedCommand, GroupedOption, engine_options
from inferplane.config.args import EngineArgs


@click.command("chat", cls=GroupedCommand)
@click.option(
    "--prompt", cls=GroupedOption, group="Chat", help="Ask this, print the answer on stdout and nothing else."
)
@click.option("--system", cls=GroupedOption, group="Chat", help="System message.")
@click.option(
    "--max-tokens",
    cls=GroupedOption,
    group="Chat",
    type=int,
    help="Longest answer. Default: what the context leaves.",
)
@click.option(
    "--temperature",
    cls=GroupedOption,
    group="Chat",
    type=float,
    help="0 is greedy. Default: the model's, else 0.",
)
@click.option("--top-p", cls=GroupedOption, group="Chat", type=float, help="Default: the model's, else 1.")
@click.option(
    "--sampling-seed", cls=GroupedOption, group="Chat", type=int, help="Makes sampled answers repeatable."
)
@engine_options
def chat(
    engine_args: EngineArgs,
    prompt: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    sampling_seed: int | None,
) -> None:
    """Talk to MODEL: a folder, a GGUF file, a Hugging Face id, or by default the demo model.

    Without --prompt in a terminal it is a conversation; with a pipe, the question is read from stdin.
    """
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
    if prompt is not None and not prompt.strip():
        raise click.UsageError("the prompt is empty")

    from inferplane.engine.llm import LLM

    params = _params(max_tokens, temperature, top_p, sampling_seed)
    history = [{"role": "system", "content": system}] if system else []
    with LLM(engine_args=engine_args) as llm:
        if prompt is not None:
            _answer(llm, [*history, {"role": "user", "content": prompt}], params)
            return
        _converse(llm, history, params)


def _params(
    max_tokens: int | None, temperature: float | None, top_p: float | None, seed: int | None
) -> dict[str, Any]:
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    return {name: value for name, value in given.items() if value is not None}


def _answer(llm: Any, messages: list[dict[str, str]], overrides: dict[str, Any]) -> str:
    """Streams the answer to stdout and returns it."""
    shown = ""
    for output in llm.stream_chat(messages, overrides):
        text = output.outputs[0].text
        click.echo(text[len(shown) :], nl=False)
        sys.stdout.flush()
        shown = text
    click.echo()
    return shown


def _converse(llm: Any, history: list[dict[str, str]], overrides: dict[str, Any]) -> None:
    click.echo("Ctrl-D ends the conversation, /clear forgets it.", err=True)
    start = list(history)
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo(err=True)
            return
        if question == "/clear":
            history = list(start)
            continue
        if not question:
            continue
        history.append({"role": "user", "content": question})
        try:
            history.append({"role": "assistant", "content": _answer(llm, history, overrides)})
        except KeyboardInterrupt:  # stops this answer only
            click.echo()
            history.pop()
        except ValueError as error:  # too long for the context, say
            click.echo(f"error: {error}", err=True)
            history.pop()
