"""An engine process that computes nothing: one token for every stream at each tick of a clock.

Started by `server_cost.py` in place of the real one; speaks the same messages. The pace comes from the environment
variable ``PACED_ENGINE_STEP_S``.
"""

from __future__ import annotations

import os
import random
import sys
import time

import msgspec
import zmq

from inferplane.engine import messages
from inferplane.engine.messages import Abort, Add, Configure, Progress, Ready, Shutdown
from inferplane.engine.stats import EngineStats
from inferplane.request import EngineOutput, EngineRequest, FinishReason

ORDINARY_IDS = range(300, 20_000)
"""Words and parts of words in the vocabularies of today."""


def main(inbox_address: str, outbox_address: str) -> None:
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.set_hwm(0)
    outbox.set_hwm(0)
    inbox.bind(inbox_address)
    outbox.connect(outbox_address)
    configure = messages.decode_to_engine(inbox.recv())
    assert isinstance(configure, Configure)
    stats = msgspec.structs.replace(EngineStats.at_start(), num_blocks=1, num_free_blocks=1)
    outbox.send(messages.encode(Ready(configure.config.model.max_model_len, stats, {})))
    step_s, due_s = float(os.environ["PACED_ENGINE_STEP_S"]), time.monotonic()
    running: dict[str, tuple[EngineRequest, int]] = {}
    chance = random.Random(0)
    while True:
        wait_s = max(0.0, due_s - time.monotonic()) if running else 1.0
        while inbox.poll(wait_s * 1e3):
            match messages.decode_to_engine(inbox.recv()):
                case Add(requests):
                    if not running:
                        due_s = time.monotonic() + step_s
                    running.update((request.request_id, (request, 0)) for request in requests)
                case Abort(request_ids):
                    for request_id in request_ids:
                        running.pop(request_id, None)
                case Shutdown():
                    return
            wait_s = max(0.0, due_s - time.monotonic())
        due_s += step_s
        outputs = []
        for request_id, (request, num_done) in list(running.items()):
            output = EngineOutput(request_id=request_id, new_token_ids=[chance.choice(ORDINARY_IDS)])
            running[request_id] = request, num_done + 1
            if num_done + 1 == request.max_tokens:
                output.finish_reason = FinishReason.LENGTH
                del running[request_id]
            outputs.append(output)
        # also without outputs it is a sign of life
        outbox.send(messages.encode(Progress(outputs, stats)))


if __name__ == "__main__":
    main(*sys.argv[1:])
