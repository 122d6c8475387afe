"""What the operator sets about the server itself; the engine's settings are `EngineArgs`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use; empty means the model as given on the command line."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Any one of them opens the guarded routes; empty leaves the server open. Not in the repr, and so in no log."""
    chat_template: str | None = None
    """Jinja text that replaces the model's own template."""
    allow_origins: tuple[str, ...] = ()
    """Web origins whose scripts may call this server; ``*`` for any."""
    max_body_bytes: int = 16 * 2**20
    drain_timeout_s: float = 30.0
    """How long requests in flight may take to finish after SIGTERM."""
    log_level: str = "info"
    access_log: bool = True
