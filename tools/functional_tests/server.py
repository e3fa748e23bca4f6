#!/usr/bin/env python3
"""A process with the trainer imported, which forks the ranks of one run after another: torch is imported once, not once a rank and run.

One JSON object a line on standard input: arguments (of pretrain_dllm.py), processes, environment, output (a file that all ranks append to);
one on standard output once the ranks have ended: statuses, by rank. It ends, and its ranks with it, when its parent does.
"""
from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_dllm  # noqa: E402

POLL_SECONDS = 0.02
# After one rank fails: how long the others may take to end by themselves.
GRACE_SECONDS = 5.0


def main() -> int:
    gc.freeze()  # so that no child copies pages by collecting what all share
    parent = os.getppid()
    for line in sys.stdin:
        request = json.loads(line)
        statuses = run(request["arguments"], request["processes"], request["environment"], request["output"], parent)
        print(json.dumps({"statuses": statuses}), flush=True)
    return 0


def run(arguments: Sequence[str], processes: int, environment: Mapping[str, str], output: str, parent: int) -> list[int]:
    """The exit status of each rank; negative where a signal ended it. One that fails takes the others with it."""
    port = free_port()
    ranks = {fork(arguments, environment | launch(rank, processes, port), output): rank for rank in range(processes)}
    statuses: dict[int, int] = {}
    deadline = float("inf")
    while ranks.keys() - statuses.keys():
        for pid in ranks.keys() - statuses.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS) if statuses[pid] else deadline
        if time.monotonic() > deadline or os.getppid() != parent:
            for pid in ranks.keys() - statuses.keys():
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(POLL_SECONDS)
    if os.getppid() != parent:
        sys.exit(1)
    return [statuses[pid] for pid in ranks]


def launch(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun would set for this rank; nothing where one process runs alone."""
    if processes == 1:
        return {}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def fork(arguments: Sequence[str], environment: Mapping[str, str], output: str) -> int:
    """Start one rank; its process id. The child never returns."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        for descriptor, path, mode in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY), (2, output, os.O_WRONLY)):
            os.dup2(os.open(path, mode | os.O_CREAT | os.O_APPEND), descriptor)
        status = pretrain_dllm.main(arguments)
    except BaseException:  # noqa: B036  a child must not go on as the server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
