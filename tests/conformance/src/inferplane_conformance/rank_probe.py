"""One rank of a pair that tries the communicator: ``python -m inferplane_conformance.rank_probe DEVICE RANK INIT``.

Prints a JSON object: what each collective returned, as lists, and the bits of a sum that rounds.
"""

from __future__ import annotations

import json
import sys

WORLD_SIZE = 2


def main() -> None:
    import torch

    from inferplane.api import ProcessGroup
    from inferplane_conformance.subject import Subject

    device, rank, init_method = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    subject = Subject(device)
    runtime = subject.platform.device_runtime(subject.device)
    runtime.set_up(subject.config("float32"), rank)
    with torch.inference_mode():
        comm = subject.platform.communicator(ProcessGroup(rank, WORLD_SIZE, init_method), runtime)
        mine = runtime.to_device(torch.arange(6.0).view(2, 3) + 10 * rank)
        noise = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
        answers = {
            "ranks": [comm.rank, comm.world_size],
            "sum": runtime.to_host(comm.all_reduce(mine.clone())).tolist(),
            "half_sum": runtime.to_host(comm.all_reduce(mine.clone().bfloat16())).tolist(),
            "gather_0": runtime.to_host(comm.all_gather(mine, 0)).tolist(),
            "gather_1": runtime.to_host(comm.all_gather(mine, 1)).tolist(),
            "gather_view": runtime.to_host(comm.all_gather(mine.t(), -1)).tolist(),
            "broadcast": runtime.to_host(comm.broadcast(mine.long()[0])).tolist(),
            "sum_bits": runtime.to_host(comm.all_reduce(runtime.to_device(noise))).view(torch.int32).tolist(),
        }
        comm.close()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
