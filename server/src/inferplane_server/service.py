"""`Service`: what every route of one server shares."""

from __future__ import annotations

import hashlib
import time
import uuid
from functools import cached_property
from importlib.metadata import version

from starlette.requests import Request

from inferplane.api.engine import Engine
from inferplane.engine.errors import TaskError
from inferplane_server.errors import ApiError
from inferplane_server.lifecycle import Lifecycle
from inferplane_server.logprobs import TokenTexts
from inferplane_server.metrics import ServerMetrics
from inferplane_server.prompts import ChatPrompts
from inferplane_server.settings import ServerSettings


class Service:
    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.lifecycle = Lifecycle(engine)
        self.metrics = ServerMetrics(engine.stats)
        self.started_s = int(time.time())
        self.model_names = settings.served_model_names or (engine.config.model.model,)

    @classmethod
    def of(cls, request: Request) -> Service:
        service = request.app.state.service
        assert isinstance(service, cls)
        return service

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.engine.tokenizer)

    @cached_property
    def chat_prompts(self) -> ChatPrompts:
        return ChatPrompts(self.engine.tokenizer, self.settings.chat_template)

    @cached_property
    def system_fingerprint(self) -> str:
        """Changes with anything that may change the answer to a request with a seed."""
        text = f"{version('inferplane')} {self.engine.config}"
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]

    def check_model(self, name: str | None) -> str:
        """The model's name as asked for. Raises `ApiError` with status 404 for one that is not served."""
        if name in self.model_names:
            return name
        served = " or ".join(f"'{known}'" for known in self.model_names)
        problem = (
            f"The model '{name}' does not exist here" if name is not None else "The request names no model"
        )
        raise ApiError(404, f"{problem}; this server has {served}.", param="model", code="model_not_found")

    def check_generates(self) -> None:
        """Raises `TaskError` of a model that makes vectors of prompts instead of tokens."""
        if "generate" not in (tasks := self.engine.config.model.tasks):
            raise TaskError("generate", tasks)


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
