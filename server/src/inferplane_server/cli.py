"""``inferplane serve``. Imports the web framework only when the engine is already starting."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import sys
from typing import Any

import click

from inferplane.cli.options import ByteSize, GroupedCommand, GroupedOption, engine_options
from inferplane.config import EngineArgs
from inferplane.config.environment import environment
from inferplane_server.settings import ServerSettings

logger = logging.getLogger(__name__)

_DEFAULTS = ServerSettings()


def _option(group: str, *names: str, **settings: Any) -> Any:
    return click.option(*names, cls=GroupedOption, group=group, **settings)


@click.command(cls=GroupedCommand)
@_option(
    "Server",
    "--host",
    default=_DEFAULTS.host,
    show_default=True,
    help="Address to listen on; 0.0.0.0 for all of them.",
)
@_option(
    "Server",
    "--port",
    default=_DEFAULTS.port,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="0 takes any free port.",
)
@_option(
    "Server", "--served-model-name", "served_model_names", multiple=True,
    help="Name that requests use for the model. May be given more than once. Default: MODEL.",
)  # fmt: skip
@_option("Server", "--chat-template", help="Jinja template in place of the model's own: a file, or the text.")
@_option(
    "Server", "--drain-timeout-s", default=_DEFAULTS.drain_timeout_s, show_default=True, type=click.FloatRange(0),
    help="Time for requests in flight to finish after SIGTERM.",
)  # fmt: skip
@_option(
    "Server", "--max-body-bytes", default=_DEFAULTS.max_body_bytes, show_default=True, type=ByteSize(),
    help="Largest body of a request: bytes, or a number with KiB, MiB, GiB.",
)  # fmt: skip
@_option(
    "Server", "--log-level", default=_DEFAULTS.log_level, show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]), help="What to log.",
)  # fmt: skip
@_option(
    "Server",
    "--no-access-log",
    "access_log",
    flag_value=False,
    default=True,
    help="Log no line for each request.",
)
@_option(
    "Access", "--api-key", "api_keys", multiple=True,
    help="Key that requests must carry; may be given more than once. Other users of this machine can read the command "
    "line: the environment variable INFERPLANE_API_KEY keeps it from them.",
)  # fmt: skip
@_option(
    "Access", "--allow-origin", "allow_origins", multiple=True,
    help="Web origin whose scripts may call the server; * for any. May be given more than once.",
)  # fmt: skip
@engine_options
def serve(
    engine_args: EngineArgs, api_keys: tuple[str, ...], chat_template: str | None, **options: Any
) -> None:
    """Serve a model over HTTP to OpenAI clients.

    The port answers at once: /health says 503 until the model is loaded.
    """
    _set_log_level(options["log_level"])
    _check_server_options(options)
    settings = ServerSettings(
        api_keys=_all_keys(api_keys), chat_template=_template_text(chat_template), **options
    )
    if not settings.api_keys and not _is_loopback(settings.host):
        logger.warning(
            "%s can be reached from other machines, and no --api-key guards the server", settings.host
        )
    from inferplane_server.serving import serve_until_stopped

    sys.exit(serve_until_stopped(engine_args, settings))


def _check_server_options(options: dict[str, Any]) -> None:
    if not all(name.strip() for name in options["served_model_names"]):
        raise click.UsageError("--served-model-name must not be empty")
    if options["max_body_bytes"] < 1:
        raise click.UsageError("--max-body-bytes must be at least 1, got 0: every request would be refused")
    if math.isnan(options["drain_timeout_s"]):
        raise click.UsageError("--drain-timeout-s must be a number of seconds, got nan")


def _set_log_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())
    if level == "info":
        # what it says of its own start and end says less than ours
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def _all_keys(given: tuple[str, ...]) -> tuple[str, ...]:
    if os.environ.get("INFERPLANE_API_KEY") == "":
        raise click.UsageError(
            "INFERPLANE_API_KEY is set but empty, which would leave the server open; unset it if that is meant"
        )
    from_environment = environment("INFERPLANE_API_KEY")
    keys = (*given, *([from_environment] if from_environment else []))
    if not all(key.strip() for key in keys):
        raise click.UsageError("--api-key must not be empty")
    return keys


def _template_text(text_or_path: str | None) -> str | None:
    if text_or_path is None:
        return None
    from inferplane.tokenizer.chat_template import ChatTemplate, ChatTemplateError
    from inferplane.tokenizer.template_files import operator_template

    text = operator_template(text_or_path)
    try:
        ChatTemplate({"default": text}).check()
    except ChatTemplateError as error:
        raise click.UsageError(f"--chat-template: {error}") from error
    return text


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
