"""A child process that judges: tasks go in as JSON lines, answers come out as JSON lines, and whatever ends it early is
told apart - silence, a flood of output, a signal, an exit.

Kernels under judgement crash, hang and print without end. The child's own words (its stderr, and the stdout of whatever
runs in it) are read as they come and all but the last of them dropped, so that neither a pipe nor a disk fills up. What
a kernel has started ends with the child.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kda2.errors import KDA2Error
from kda2.workbench.verifier.wire import Unreadable, Wire

# Bytes of words after which a child is taken for one that prints without end.
MOST_WORDS = 4 * 2**20
# Its environment's variable that marks a child and whatever it starts.
MARK = "KDA2_VERIFIER_CHILD"
# Asks a child where it is; it answers in its words.
WHERE = getattr(signal, "SIGUSR1", None)
# Seconds that a child has to import what it needs, however soon its answers are wanted.
START_S = 300.0
_KEPT_WORDS = 32768
_LONGEST_WORDS = 300
_MODULE = "kda2.workbench.verifier.child"
# A frame as faulthandler writes it, innermost first, and what else it writes.
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_NOISE = re.compile(r'\s*File "|(Current thread|Thread) 0x|Extension modules: |<no Python frame>|\s*\.\.\.$')
_MEANINGS = {
    "SIGSEGV": "it touched memory that is not its own",
    "SIGBUS": "it touched memory that is not its own",
    "SIGABRT": "native code in it gave up",
    "SIGKILL": "as the system does when memory runs out",
}


@dataclass(frozen=True)
class Limits:
    """Seconds without an answer after which a child is given up on, and bytes that it may print."""

    silence_s: float = 600.0
    words: int = MOST_WORDS


class Ended(KDA2Error, RuntimeError):
    """A child ended, or was ended, before it had answered. The message says how; `kind` is "silent", "flood",
    "signal", "exit" or "garbled"."""

    def __init__(self, kind: str, how: str) -> None:
        self.kind = kind
        super().__init__(how)


class NotStarted(KDA2Error, RuntimeError):
    """A child ended before it could take a task: a fault of the machine's, or of what is installed on it."""


@dataclass
class Children:
    """The children of a run, so that whoever stops it can end them all; after that no other one starts."""

    running: set[Child] = field(default_factory=set)
    stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, child: Child) -> None:
        """Raises `Ended` if the run has been stopped."""
        with self._lock:
            if not self.stopped:
                self.running.add(child)
                return
        child.close()
        raise Ended("signal", "the run was stopped")

    def kill(self) -> None:
        with self._lock:
            self.stopped, running = True, list(self.running)
        for child in running:
            child.close()


class Child:
    """One child. `ask` gives it a task and yields its answers; it serves one task after another until it is closed."""

    def __init__(
        self,
        children: Children,
        *,
        interpreted: bool = False,
        limits: Limits = Limits(),
        under: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`under`: a command that runs it, such as a memory checker with its options; `environment` adds to its own."""
        self.limits, self._children = limits, children
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._wire = Wire.made()
        own = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if interpreted else "0", MARK: self._mark}
        self._process = _start(limits, self._wire, under, {**own, **(environment or {})})
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._words, self._printed, self._flooded = b"", 0, False
        self._gone, self._file, self._ready = threading.Event(), "", False
        self._readers = [threading.Thread(target=f, daemon=True) for f in (self._read_answers, self._read_words)]
        for thread in (*self._readers, threading.Thread(target=self._see_it_go, daemon=True)):
            thread.start()
        children.add(self)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, task: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """The answers to one task, as they come; `inputs` are what it is about. Raises `Ended`; then the child is of no
        more use. Raises the `OSError` of the child's own machine, which is no answer, and `NotStarted`."""
        assert self._process.stdin is not None
        self._get_ready()
        self._file = (task.get("subject") or {}).get("file") or ""
        if inputs is not None:
            self._wire.put(inputs)
        token = secrets.token_hex(8)  # what only prints to every pipe does not know it
        with contextlib.suppress(OSError, ValueError):  # it has ended already: the next answer says how
            self._process.stdin.write(json.dumps({**task, "token": token}) + "\n")
            self._process.stdin.flush()
        while True:
            answer = self._next()
            if answer.pop("token", None) != token:
                raise self._garbled()
            if answer.get("done") is True:
                return
            if (e := answer.get("machine")) is not None:
                raise OSError(e["errno"], e["strerror"], e["filename"])
            yield answer

    def answer(self) -> dict[str, Tensor]:
        """The tensors that came with the last answer, on the CPU. Raises `Ended` if they are none."""
        try:
            return self._wire.take()
        except Unreadable as e:
            self._kill()
            raise Ended("garbled", str(e)) from e

    def finish(self, seconds: float) -> None:
        """Let it end by itself, as a checker that runs it needs to write down what it found; then `close`."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()
        self._gone.wait(seconds)
        self.close()

    @property
    def alive(self) -> bool:
        return not self._gone.is_set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._kill()
        self._gone.wait()
        self._children.running.discard(self)
        for reader in self._readers:
            reader.join(timeout=1.0)
        # a pipe that somebody still writes to is left to its reader
        readers = [None, *self._readers]
        for pipe, reads in zip((self._process.stdin, self._process.stdout, self._process.stderr), readers, strict=True):
            if pipe is not None and (reads is None or not reads.is_alive()):
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()
        self._wire.close()

    def _get_ready(self) -> None:
        """Wait for its first word; the time that takes is not the subject's."""
        if self._ready:
            return
        try:
            self._ready = self._next(START_S).get("ready") is True
        except Ended as e:
            raise NotStarted(f"the process that judges did not start: {e}") from e

    def _next(self, silence_s: float | None = None) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=silence_s or self.limits.silence_s)
        except queue.Empty:
            raise self._silent() from None
        if line is None:
            raise self._ended()
        try:
            answer = _storable(json.loads(line))
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._garbled()
        return answer

    def _garbled(self) -> Ended:
        self._kill()
        return Ended("garbled", "it wrote to the pipe that belongs to the judge's answers")

    def _silent(self) -> Ended:
        self._ask_where()
        self._kill()
        how = f"no answer within {self.limits.silence_s:g} s{self._place()}; it hangs, or needs a longer timeout"
        return Ended("silent", how + self._last_words())

    def _ended(self) -> Ended:
        left = self._gone.wait(timeout=5.0)
        if not left:  # it goes on, but nothing can be heard of it
            self._kill()
            self._gone.wait()
        self._readers[1].join(timeout=5.0)
        if self._flooded:
            return Ended("flood", f"it printed more than {self.limits.words / 2**20:g} MiB{self._last_words(80)}")
        code, words = self._process.returncode, self._last_words()
        if not left:
            return Ended("exit", f"it closed the judge's pipes{words}")
        if code < 0:
            return Ended("signal", f"killed by {_signal_words(-code)}{self._place()}{words}")
        return Ended("exit", f"it left with exit code {code}{words}")

    def _ask_where(self) -> None:
        """Let it write down where it is. Half a second is enough for one that can."""
        if WHERE is None or not self.alive:
            return
        before = self._printed
        with contextlib.suppress(OSError):
            os.kill(self.pid, WHERE)
        until = time.monotonic() + 0.5
        while self._printed == before and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.05)  # the rest of it

    def _place(self) -> str:
        """The innermost line of the subject's file that it was last seen at."""
        found = [m for m in _FRAME.finditer(self._words.decode(errors="replace")) if m["file"] == self._file]
        if not self._file or not found:
            return ""
        return f", at {Path(self._file).name}, line {found[0]['line']} in {found[0]['function']}"

    def _last_words(self, longest: int = _LONGEST_WORDS) -> str:
        lines = [line.strip() for line in self._words.decode(errors="replace").splitlines() if not _NOISE.match(line)]
        said = [words for line in lines if (words := "".join(c if c.isprintable() else " " for c in line).strip())]
        return f"; its last words: {said[-1][-longest:]}" if said else ""

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # closed from outside, or no text
            for line in self._process.stdout:
                if line.endswith("\n"):  # else it was killed while it wrote
                    self._answers.put(line)
        self._answers.put(None)

    def _read_words(self) -> None:
        assert self._process.stderr is not None
        descriptor = self._process.stderr.fileno()
        with contextlib.suppress(OSError, ValueError):
            while chunk := os.read(descriptor, 65536):
                self._words = (self._words + chunk)[-_KEPT_WORDS:]
                self._printed += len(chunk)
                if self._printed > self.limits.words and not self._flooded:
                    self._flooded = True
                    self._kill()

    def _see_it_go(self) -> None:
        """Whatever it has started ends with it. Its id is not free for others until that is done."""
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        end_descendants(self.pid, self._mark)
        self._process.wait()
        self._gone.set()

    def _kill(self) -> None:
        if not self._gone.is_set():
            _kill_group(self.pid)


def _storable(x: Any) -> Any:
    """Plain data whose texts any file can hold: half of a surrogate pair, as a kernel may say it, becomes "?"."""
    if isinstance(x, str):
        return x.encode(errors="replace").decode()
    if isinstance(x, dict):
        return {_storable(name): _storable(value) for name, value in x.items()}
    return [_storable(value) for value in x] if isinstance(x, list) else x


def end_descendants(group: int, mark: str) -> None:
    """Kill what has the mark in its environment but has left the group, then the group, the caller with it if it is
    one of them."""
    for pid in _marked(mark):
        with contextlib.suppress(OSError):
            if os.getpgid(pid) != group:
                os.kill(pid, signal.SIGKILL)
    _kill_group(group)


def _marked(mark: str) -> Iterator[int]:
    """Processes that have the mark; none where the system does not show their environments."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _kill_group(group: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL) if hasattr(os, "killpg") else os.kill(group, signal.SIGTERM)


def _signal_words(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"signal {number} ({name}{': ' + _MEANINGS[name] if name in _MEANINGS else ''})"


def _start(limits: Limits, wire: Wire, under: Sequence[str], own: Mapping[str, str]) -> subprocess.Popen[str]:
    parent = 0 if under else os.getpid()  # its parent is then the command that runs it
    facts = (str(parent), str(limits.silence_s), ",".join(map(str, wire.descriptors)))
    return subprocess.Popen(
        # -P: a file that is judged may lie here and be called random.py
        [*under, sys.executable, "-P", "-W", "ignore::RuntimeWarning", "-m", _MODULE, *facts],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,  # Ctrl-C is the parent's to handle
        pass_fds=wire.descriptors,
        env={**os.environ, **own, "PYTHONPATH": _python_path()},
    )  # fmt: skip


def _python_path() -> str:
    """The parent's, with kda2 on it unless it is installed; an empty entry would mean the working directory."""
    home = Path(__file__).parents[3]
    own = [] if home.name in ("site-packages", "dist-packages") else [str(home)]
    return os.pathsep.join([*own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def elapsed(start: float) -> float:
    """Seconds since `start` of `time.perf_counter`, as verdicts have them."""
    return round(time.perf_counter() - start, 3)
