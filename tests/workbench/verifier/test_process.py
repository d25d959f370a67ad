"""How a child ends, told apart; and that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kda2
from kda2.workbench.verifier import Children, Limits, Subject, process, stages
from kda2.workbench.verifier.process import Child, Ended, NotStarted
from kda2.workbench.verifier.words import reasons

# A child of the same protocol that starts in no time and runs what it is told.
QUICK = """
import faulthandler, json, os, signal, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.stdout.reconfigure(line_buffering=True)
faulthandler.register(signal.SIGUSR1)
token = {}
say = lambda x: print(json.dumps(x | token), file=answers, flush=True)
say({"ready": True})
for line in sys.stdin:
    token = {"token": json.loads(line)["token"]}
    for step in json.loads(line)["do"]:
        exec(step)
    say({"done": True})
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Child]]:
    (tmp_path / "quick_child.py").write_text(QUICK)
    monkeypatch.setattr(process, "_MODULE", "quick_child")
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{tmp_path}")
    children = Children()
    yield lambda **limits: Child(children, limits=Limits(**({"silence_s": 20.0} | limits)))
    children.kill()


def end(child: Child, *steps: str) -> Ended:
    with pytest.raises(Ended) as raised:
        list(child.ask({"do": steps}))
    return raised.value


def is_there(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone_within(seconds: float, *pids: int) -> bool:
    until = time.monotonic() + seconds
    while any(map(is_there, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(is_there, pids))


def test_answers_come_in_order_and_a_child_serves_again(quick: Callable[..., Child]) -> None:
    child = quick()
    assert list(child.ask({"do": ["say({'a': 1})", "say({'b': 2})"]})) == [{"a": 1}, {"b": 2}]
    assert list(child.ask({"do": ["say({'c': 3})"]})) == [{"c": 3}]
    assert child.alive
    child.close()
    assert not child.alive


def test_the_machines_faults_are_no_answers(quick: Callable[..., Child]) -> None:
    machine = "say({'machine': {'errno': 28, 'strerror': 'No space left on device', 'filename': '/x'}})"
    with pytest.raises(OSError, match="No space left on device") as raised:
        list(quick().ask({"do": [machine]}))
    assert (raised.value.errno, raised.value.filename) == (28, "/x")


@pytest.mark.parametrize(
    ("step", "kind", "how"),
    [
        ("os._exit(7)", "exit", "it left with exit code 7"),
        ("print('bye'); raise SystemExit", "exit", "it left with exit code 0; its last words: bye"),
        ("print('\\x1b[31mred\\n  \\n'); os.abort()", "signal",
         "killed by signal 6 (SIGABRT: native code in it gave up); its last words: [31mred"),
        ("os.kill(os.getpid(), 9)", "signal", "killed by signal 9 (SIGKILL: as the system does when memory runs out)"),
        ("os.kill(os.getpid(), 14)", "signal", "killed by signal 14 (SIGALRM)"),
        ("os.write(answers.fileno(), b'{]\\n')", "garbled", "it wrote to the pipe that belongs to the judge's answers"),
        ("os.write(answers.fileno(), b'3\\n')", "garbled", "it wrote to the pipe that belongs to the judge's answers"),
        ("answers.close(); os.close(1); os.close(2); import time; time.sleep(99)", "exit",
         "it closed the judge's pipes"),
    ],
)  # fmt: skip
def test_every_end_is_told_apart(quick: Callable[..., Child], step: str, kind: str, how: str) -> None:
    ended = end(quick(), step)
    assert (ended.kind, str(ended)) == (kind, how)


@pytest.mark.parametrize("token", ["{}", "{'token': 'guessed'}", "{'token': None}", "{'token': [token['token']]}"])
def test_an_answer_without_the_tasks_token_is_none(quick: Callable[..., Child], token: str) -> None:
    child = quick()
    line = f"print(json.dumps({{'gates': {{}}}} | {token}), file=answers, flush=True)"
    ended = end(child, line)
    assert ended.kind == "garbled" and gone_within(5, child.pid)


def test_the_token_of_a_task_before_is_none(quick: Callable[..., Child]) -> None:
    child = quick()
    assert list(child.ask({"do": ["kept = dict(token)"]})) == []
    assert end(child, "token = kept", "say({'a': 1})").kind == "garbled"


@pytest.mark.parametrize("garbage", ["b'no tensors'", "b''", "b'\\x02' + 7 * b'\\0' + b'[]'"])
def test_garbage_in_the_file_of_answers_ends_it(quick: Callable[..., Child], garbage: str) -> None:
    child = quick()
    write = f"os.pwrite(int(sys.argv[3].split(',')[1]), {garbage}, 0)"
    assert list(child.ask({"do": [write, "say({'gates': {}})"]}, {"q": 1})) == [{"gates": {}}]
    with pytest.raises(Ended, match="its answer is no safetensors file: ") as raised:
        child.answer()
    assert raised.value.kind == "garbled" and gone_within(5, child.pid)


@pytest.mark.parametrize(
    "flood",
    [
        "while True: print('never ending')",
        "while True: os.write(1, b'x' * 9999)",
        "while True: os.write(2, b'\\0' * 999)",
    ],
)
def test_a_flood_ends_at_its_limit(quick: Callable[..., Child], flood: str) -> None:
    child = quick(words=2**18)
    ended = end(child, flood)
    assert ended.kind == "flood" and str(ended).startswith("it printed more than 0.25 MiB")
    assert len(str(ended)) < 200
    assert child._printed < 2**18 + 2**20 and len(child._words) <= process._KEPT_WORDS


def test_many_words_below_the_limit_are_let_through(quick: Callable[..., Child]) -> None:
    assert list(quick().ask({"do": ["os.write(2, b'x' * 2**20)", "say({'a': 1})"]})) == [{"a": 1}]


@pytest.mark.parametrize("sleep", ["while True: pass", "import time; time.sleep(99)"])
def test_silence_ends_it(quick: Callable[..., Child], sleep: str) -> None:
    child = quick(silence_s=0.5)
    ended = end(child, "print('so far')", sleep)
    assert ended.kind == "silent"
    assert str(ended) == "no answer within 0.5 s; it hangs, or needs a longer timeout; its last words: so far"
    assert gone_within(5, child.pid)


def test_its_own_start_is_no_silence_of_the_subject(
    quick: Callable[..., Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_child.py").write_text("import time; time.sleep(1.0)\nimport quick_child\n")
    monkeypatch.setattr(process, "_MODULE", "slow_child")
    assert list(quick(silence_s=0.3).ask({"do": ["say({'a': 1})"]})) == [{"a": 1}]


def test_one_that_does_not_start_is_no_fault_of_the_subject(
    quick: Callable[..., Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_child.py").write_text("raise ImportError('no torch here')\n")
    monkeypatch.setattr(process, "_MODULE", "broken_child")
    with pytest.raises(NotStarted, match=r"did not start: it left with exit code 1; its last words: .*no torch here"):
        list(quick().ask({"do": []}))


def test_the_folder_it_is_started_in_hides_no_module(
    quick: Callable[..., Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "quick_child.py").rename(home / "quick_child.py")
    (tmp_path / "random.py").write_text("raise ImportError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{home}{os.pathsep}")  # an empty entry is the working directory
    assert list(quick().ask({"do": ["import random; say({'random': random.Random(0).random() < 1})"]})) == [
        {"random": True}
    ]


GRANDCHILDREN = (
    "import subprocess, time",
    "a = subprocess.Popen(['sleep', '99']).pid",
    "b = subprocess.Popen(['sleep', '99'], start_new_session=True).pid",
    "c = os.fork() or time.sleep(99)",
    "say({'pids': [a, b, c]})",
)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_what_it_has_started_ends_with_it(quick: Callable[..., Child]) -> None:
    child = quick()
    ((found),) = child.ask({"do": GRANDCHILDREN})
    assert all(map(is_there, found["pids"]))
    child.close()
    assert gone_within(5, child.pid, *found["pids"])


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_crash_is_seen_though_others_hold_its_pipes(quick: Callable[..., Child]) -> None:
    start = time.monotonic()
    answers = quick().ask({"do": [*GRANDCHILDREN, "os.abort()"]})
    found = next(answers)
    with pytest.raises(Ended, match="SIGABRT"):
        next(answers)
    assert time.monotonic() - start < 10  # not the 20 s of silence
    assert gone_within(5, *found["pids"])


def test_no_child_starts_after_the_run_was_stopped(quick: Callable[..., Child]) -> None:
    child = quick()
    child._children.kill()
    assert not child.alive
    with pytest.raises(Ended, match="the run was stopped"):
        quick()


# With the real child.


ENDS = {
    "abort": ("import os; os.abort()", "killed by signal 6 (SIGABRT: native code in it gave up), at kernel.py, line"),
    "segfault": ("import ctypes; ctypes.string_at(0)",
                 "killed by signal 11 (SIGSEGV: it touched memory that is not its own), at kernel.py, line 13 in run"),
    "hang": ("while True: pass", "no answer within 3 s, at kernel.py, line 13 in run; it hangs, or needs a longer"),
    "flood": ("while True: print('again ' * 50)", "it printed more than 4 MiB; its last words: "),
}  # fmt: skip
FIRST = "    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]\n"


@pytest.mark.parametrize("name", ENDS)
def test_a_kernel_that_ends_its_process_fails_with_the_place(
    shared: Any, plain: str, changed: Callable[..., str], conditions: Callable[..., Any], name: str
) -> None:
    line, how = ENDS[name]
    path = shared.file(changed(plain, FIRST, f"{FIRST}    {line}\n"))
    on = conditions(families=("random", "no_decay"), limits=Limits(3.0))
    verdict = stages.numerics(Children(), Subject.of_file(path), on, lambda _: None)
    assert (verdict.stage, verdict.outcome) == ("L3", "fail")
    assert verdict.evidence["ended"].startswith(f"the process ended before 'random' was answered: {how}")
    assert reasons(verdict)[0] == verdict.evidence["ended"]


def test_what_was_answered_before_the_end_is_kept(
    shared: Any, plain: str, changed: Callable[..., str], conditions: Callable[..., Any]
) -> None:
    path = shared.file(changed(plain, FIRST, f"{FIRST}    import os\n    T == 1 and os._exit(1)\n", "scale * (S", "(S"))
    on = conditions(families=("random", "one_token", "no_decay"))
    verdict = stages.numerics(Children(), Subject.of_file(path), on, lambda _: None)
    first, second = reasons(verdict)
    assert first == "the process ended before 'one_token' was answered: it left with exit code 1"
    assert second.startswith("random: o is off") and verdict.outcome == "fail"


def test_an_end_while_launches_are_recorded_is_left_to_the_numerics(
    shared: Any, plain: str, changed: Callable[..., str], conditions: Callable[..., Any]
) -> None:
    path = shared.file(changed(plain, FIRST, f"{FIRST}    import os; os._exit(5)\n"))
    with Child(Children()) as child:
        found = stages.code(child, Subject.of_file(path), conditions())
    why = "not_run(the process ended while its launches were recorded: it left with exit code 5)"
    assert [v.outcome for v in found] == ["pass", why, why]


def test_an_end_while_it_is_imported_fails(shared: Any, plain: str, conditions: Callable[..., Any]) -> None:
    path = shared.file(f"import os\nos.abort()\n{plain}")
    with Child(Children()) as child:
        found = stages.code(child, Subject.of_file(path), conditions())
    assert [v.outcome for v in found] == ["pass", "fail", "not_run(the process ended)"]
    assert found[1].evidence["ended"].startswith("the process ended while it was imported: killed by signal 6")
    assert "at kernel.py, line 2 in <module>" in found[1].evidence["ended"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_parent_that_ends_leaves_nothing(shared: Any, plain: str, changed: Callable[..., str], how: int) -> None:
    path = shared.file(changed(plain, FIRST, f"{FIRST}    hang()\n", "def run(", HANG))
    pids = path.with_name("pids")
    command = [sys.executable, "-P", "-m", "kda2.cli", "verify", str(path), "--out", str(path.with_name("out"))]
    env = {**os.environ, "PYTHONPATH": str(Path(kda2.__file__).parents[1])}
    parent = subprocess.Popen(command, cwd=path.parent, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not pids.exists() and time.monotonic() < until and parent.poll() is None:
            time.sleep(0.1)
        found = [int(pid) for pid in pids.read_text().split()]
        assert len(found) == 3 and all(map(is_there, found))
        parent.send_signal(how)
        code = parent.wait(timeout=15)
        assert gone_within(5, *found)
        assert code == (130 if how == signal.SIGINT else -how)
    finally:
        parent.kill()


# Writes down its process and two that it has started, one of them in a session of its own.
HANG = """def hang():
    import os, subprocess, time
    started = [subprocess.Popen(["sleep", "99"], start_new_session=own).pid for own in (False, True)]
    with open(__file__[:-len("kernel.py")] + "new", "w") as f:
        f.write(" ".join(map(str, (os.getpid(), *started))))
    os.rename(f.name, f.name[:-len("new")] + "pids")
    while True:
        time.sleep(0.1)


def run("""
