"""Starts recipes: each is asked what it would start, and a process that has the trainer imported forks those ranks (server.py)."""
from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from functional_tests.cases import ROOT

HERE = Path(__file__).resolve().parent
# Read when torch or triton is imported: processes that differ in one of them need different servers.
READ_AT_IMPORT = ("PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "TRITON_INTERPRET")
IMPORT_SECONDS = 300.0


class RunFailed(RuntimeError):
    """A recipe ended with a status other than 0; the text has its last lines."""


@dataclass(frozen=True)
class Command:
    """What a recipe starts: arguments of pretrain_dllm.py, on so many processes of this host."""

    arguments: tuple[str, ...]
    processes: int
    environment: Mapping[str, str]


def ask(recipe: str, flags: Sequence[str], environment: Mapping[str, str], folder: Path) -> Command:
    """Run a recipe up to the point where it starts the trainer; data that it generates are made. `folder` takes two files."""
    file = folder / "command"
    ours = {"PYTHON": str(HERE / "interpreter.sh"), "REAL_PYTHON": sys.executable, "RECIPE_COMMAND": str(file)}
    result = subprocess.run(["bash", str(ROOT / recipe), *flags], env={**environment, **ours}, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode or not file.is_file():
        raise RunFailed(f"{recipe} {' '.join(flags)} ended with status {result.returncode} and starts nothing:\n{result.stdout[-3000:]}")
    words = file.read_text().split("\0")[:-1]
    entries = Path(f"{file}.environment").read_text().split("\0")[:-1]
    script = next(number for number, word in enumerate(words) if word.endswith("/pretrain_dllm.py"))
    processes = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words[:script] else 1
    kept = {name: value for name, _, value in (entry.partition("=") for entry in entries) if name not in ours}
    return Command(tuple(words[script + 1:]), processes, kept)


class Server:
    """One server process; one run at a time."""

    def __init__(self, environment: Mapping[str, str]):
        # A session of its own: what it has forked goes with it.
        self._process = subprocess.Popen([sys.executable, str(HERE / "server.py")], env=dict(environment), cwd=ROOT, text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    def run(self, command: Command, output: Path, seconds: float) -> None:
        """RunFailed when a rank fails, or the run takes longer; the server is of no use after the latter."""
        request = {"arguments": command.arguments, "processes": command.processes, "environment": dict(command.environment),
                   "output": str(output)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout], [], [], IMPORT_SECONDS + seconds)
        answer = self._process.stdout.readline() if readable else ""
        said = output.read_text(errors="replace")[-3000:] if output.is_file() else ""
        if not answer:
            ended = self._process.poll()
            raise RunFailed(f"{' '.join(command.arguments)}: "
                            + (f"stopped after {seconds:g} s" if ended is None else f"the server ended with status {ended}") + f":\n{said}")
        statuses = json.loads(answer)["statuses"]
        if any(statuses):
            raise RunFailed(f"{' '.join(command.arguments)} ended with status {statuses} (of each rank):\n{said}")

    def kill(self) -> None:
        """End it, and whatever it has forked."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """The same, and wait for its end."""
        self.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@dataclass
class Launcher:
    """Servers by what they have imported under; started when first needed, another where all of a kind are busy with runs of other threads.
    A context manager that ends them."""

    idle: dict[tuple[str | None, ...], list[Server]] = field(default_factory=dict)
    busy: list[Server] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, command: Command, output: Path, seconds: float) -> None:
        """Run the command to its end; RunFailed as Server.run says."""
        key = tuple(command.environment.get(name) for name in READ_AT_IMPORT)
        with self.lock:
            idle = self.idle.setdefault(key, [])
            server = idle.pop() if idle else Server(command.environment)
            self.busy.append(server)
        try:
            server.run(command, output, seconds)
        except BaseException as reason:
            server.close()
            if not isinstance(reason, RunFailed) and output.is_file():  # such as a time limit: where it stood
                print(f"stopped; its output ends with\n{output.read_text(errors='replace')[-2000:]}", file=sys.stderr, flush=True)
            raise
        else:
            with self.lock:
                idle.append(server)
        finally:
            with self.lock:
                self.busy.remove(server)

    def stop(self) -> None:
        """End the runs of other threads; each of them sees that its server has ended."""
        with self.lock:
            for server in self.busy:
                server.kill()

    def close(self) -> None:
        self.stop()
        with self.lock:
            for servers in self.idle.values():
                for server in servers:
                    server.close()
            self.idle.clear()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
