"""The processes around a run, each on its own: ranks that hang on their way out, parents that go, idle ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import rank_programs
import survivors

import dplab

HERE = os.path.dirname(__file__)


def test_a_rank_that_hangs_after_its_result_is_not_waited_for(tmp_path: Path) -> None:
    """With the limit shortened: the supervisor runs in a process of its own, started by hand."""
    code = f"""
import os, sys
sys.path.insert(0, {HERE!r})
import rank_programs
from dplab.launcher import launch as launching, supervisor, starter
supervisor.LEAVE_SECONDS = 0.3
def start(job, *, warm):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        supervisor.main(job, supervisor.fork_rank)
    return starter.Identity.of(pid)
launching.start_run = start
run = launching.launch(rank_programs.hang_at_exit, world_size=2, root={str(tmp_path)!r})
print(run.wait(60), run.state, run._directory.exit()["ranks"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    killed = "{'rank': %d, 'status': -9, 'how': 'returned', 'signal': 'SIGKILL'}"
    assert done.stdout == f"[0, 1] finished [{killed % 0}, {killed % 1}]\n"


def test_threads_of_the_program_finish_before_its_result(tmp_path: Path) -> None:
    run = dplab.launch(rank_programs.save_in_a_thread, args=(str(tmp_path / "saved"),), detach=False)
    assert run.wait(60) == [None]
    assert (tmp_path / "saved").read_text() == "all of it"


def test_data_loader_workers_in_a_forked_rank() -> None:
    run = dplab.launch(rank_programs.load_with_workers, world_size=2, detach=False, warm=True)
    assert run.wait(60) == [list(range(16))] * 2
    assert not [event for event in run.events() if event.name == "from a worker"]


def test_data_loader_workers_go_when_the_supervisor_is_killed() -> None:
    run = dplab.launch(rank_programs.load_for_ever, detach=False, warm=True)
    survivors.rank_pids(run.path, 1)
    assert len(survivors.processes(run.path)) >= 3  # supervisor, rank, worker
    os.kill(survivors.supervisor_pid(run.path), signal.SIGKILL)
    survivors.assert_none(run.path, limit=20)  # torch's workers look for their parent every five seconds


IDLE = """
from dplab.launcher import warm
warm.PRELOADED, warm.IDLE_SECONDS = (), 0.1
warm.main()
"""


def test_warm_parent_ends_when_idle_when_its_pipe_closes_and_when_its_parent_goes() -> None:
    me = str(os.getpid())
    idle = subprocess.Popen([sys.executable, "-c", IDLE, me], stdin=subprocess.PIPE)
    assert idle.wait(30) == 0
    patient = IDLE.replace("0.1", "1e6")
    closed = subprocess.Popen([sys.executable, "-c", patient, me], stdin=subprocess.PIPE)
    assert closed.stdin is not None
    closed.stdin.close()
    assert closed.wait(30) == 0
    reading, writing = os.pipe()  # a pipe that stays open: its parent's end is the only sign
    middle = f"""
import os, subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {patient!r}, str(os.getpid())], stdin={reading}, stdout=2).pid)
"""
    told = subprocess.run([sys.executable, "-c", middle], pass_fds=[reading], stdout=subprocess.PIPE, check=True)
    survivors.poll(lambda: not psutil.pid_exists(int(told.stdout)), "the warm parent has seen its parent go")
    os.close(reading)
    os.close(writing)


WATCHED = """
import os, time
from dplab.launcher import linux
linux.LINUX = {linux}
parent = os.getpid()
child = os.fork()
if child == 0:
    linux.die_with(parent)
    while True:
        time.sleep(0.01)
print(child, flush=True)
input()
"""


def test_a_rank_dies_with_its_supervisor_on_any_system() -> None:
    for linux in (True, False):
        process = subprocess.Popen([sys.executable, "-c", WATCHED.format(linux=linux)], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert psutil.pid_exists(child)
        process.kill()
        process.communicate()
        survivors.poll(lambda pid=child: not psutil.pid_exists(pid), f"the child has gone too (linux={linux})")


def test_a_fork_of_the_launching_process_has_a_warm_parent_of_its_own(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {HERE!r})
import dplab, rank_programs
from dplab.launcher.starter import WARM
def launched():
    return dplab.launch(rank_programs.place, root={str(tmp_path)!r}, detach=False, warm=True).wait(60)
assert launched() == [(0, 1)]
mine = WARM.pid
child = os.fork()
if child == 0:
    ok = launched() == [(0, 1)] and WARM.pid != mine
    WARM.close()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert WARM.pid == mine and launched() == [(0, 1)]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
