"""The run directory: where each file of a run lies, how it is written whole, and what state the run is in.

    run.json            what was asked: spec, versions, schema
    starter.json        the process from which the supervisor comes
    pids.json           supervisor and ranks, each pid with its creation time
    restarts.json       restarts so far; absent where there was none
    exit.json           how the run ended; absent while it runs
    control/            what somebody asked of the run (`wishes`): stop, pause, profile
    rank-<r>/           events.jsonl, utilization.jsonl, stdout.log, stderr.log, state, result.pkl, error.json

The directory is private to its owner (0700, files 0600).
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

from dplab.errors import RunError, UsageError
from dplab.specs import RunSpec
from dplab.telemetry import wishes
from dplab.telemetry.events import SCHEMA
from dplab.telemetry.files import damaged, read_json, reserve, write_json
from dplab.telemetry.process import Identity
from dplab.telemetry.restarts import Restart, read_restarts
from dplab.telemetry.state import RankState, read_state

DAMAGED = "damaged"
"""State of a run whose files cannot be read, or were written by another version; `damage` tells which and why."""
_WRITTEN_ENDS = ("finished", "failed", "stopped")
ENDED = (*_WRITTEN_ENDS, DAMAGED)
"""States in which nothing more is to come."""
STATES = ("starting", "running", "restarting", "paused", "stopping", *ENDED)
STOP_SECONDS = 10.0
"""How long a run that is asked to stop may take to end by itself, where nobody says otherwise."""

_EXIT: dict[str, Any] = {"state": None, "first": None, "collateral": [], "reason": None, "ranks": [], "notes": []}

_STARTING_SECONDS = 5.0
"""How long a run whose starter is gone may still be on its way to its first pids.json."""


class RunDirectory:
    """One run's directory; everything another process may know about the run is read through this."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._spec: tuple[tuple[int, int, int], RunSpec] | None = None
        """what was read last, and the file that it is of"""

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    def rank(self, rank: int) -> Path:
        """Directory of one rank."""
        return self.path / f"rank-{rank}"

    def standing(self, rank: int) -> RankState | None:
        """Where a rank stands, or stood last: its state page; None where it noted nothing. RunError where it is
        damaged."""
        return read_state(self.rank(rank) / "state")

    @property
    def control(self) -> Path:
        """Where wishes are written."""
        return self.path / "control"

    @property
    def rendezvous(self) -> str:
        """`init_method` of the run's process group: a file, so no port can collide or be joined by a stranger."""
        return f"file://{self.path}/rendezvous"

    def create(self, info: dict[str, Any], world_size: int) -> None:
        """Makes the directory and its reserved space; FileExistsError if it is there, RunError on a full disk."""
        try:
            self.path.mkdir(mode=0o700, parents=True)
            os.chmod(self.path, 0o700)  # whatever the umask took away
            (self.path / "control").mkdir(mode=0o700)
            reserve(self.path / "exit.json")
            for rank in range(world_size):
                self.rank(rank).mkdir(mode=0o700)
                reserve(self.rank(rank) / "error.json")
            write_json(self.path / "run.json", {"schema": SCHEMA, **info})
        except OSError as error:
            if isinstance(error, FileExistsError):
                raise
            raise RunError(f"run directory {self.path} cannot be made: {error.strerror}; "
                           f"free space or allow writing there, or set DPLAB_RUNS to another folder") from error

    def info(self) -> dict[str, Any]:
        """`run.json`; RunError where there is none, it is damaged or another version of dplab wrote it."""
        path = self.path / "run.json"
        info = read_json(path)
        if info is None:
            what = "does not exist" if not self.path.exists() else "holds no run.json"
            raise RunError(f"{self.path} is not a run directory: it {what}; give a directory that dplab.launch made, "
                           f"or an id that `dplab runs` lists")
        if not isinstance(info, dict) or "spec" not in info:
            raise RunError(f"{self.path} is not a run directory: its run.json is not one of dplab's; "
                           f"give a directory that dplab.launch made")
        schema, versions = info.get("schema"), info.get("versions", {})
        if not isinstance(schema, int) or not isinstance(versions, dict) or not isinstance(info.get("created"), int):
            raise damaged(path, "schema, versions or created is missing")
        if schema != SCHEMA:
            raise RunError(f"run {self.path} was written with schema {schema}, this dplab reads "
                           f"schema {SCHEMA}; read it with the dplab that wrote it ({versions.get('dplab')})")
        return info

    @property
    def spec(self) -> RunSpec:
        """What `launch` was asked for; read anew where the file is another than last time."""
        try:
            found = os.stat(self.path / "run.json")
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        except OSError:      # `info` says why
            stamp = (0, 0, 0)
        if self._spec is not None and self._spec[0] == stamp:
            return self._spec[1]
        values = self.info()["spec"]
        try:
            self._spec = stamp, RunSpec.from_dict(values)
            return self._spec[1]
        except (TypeError, AttributeError, UsageError) as error:
            raise damaged(self.path / "run.json", f"its spec is not one ({error})") from error

    def restarts(self) -> list[Restart]:
        """Restarts so far, in order."""
        return read_restarts(self.path)

    @property
    def world_size(self) -> int:
        """Ranks that the run has now: those that were asked for, or those that the last restart left."""
        restarts = self.restarts()
        return restarts[-1].world_size if restarts else self.spec.world_size

    def exit(self) -> dict[str, Any] | None:
        """`exit.json`, None before the end: `state`, `first`, `collateral`, `reason`, `ranks`."""
        path = self.path / "exit.json"
        found = read_json(path)
        if found is None:
            return None
        ended = {**_EXIT, **found} if isinstance(found, dict) else _EXIT
        try:
            whole = all({"rank", "status", "how", "signal"} <= set(end) for end in ended["ranks"])
            named = {*ended["collateral"], *([] if ended["first"] is None else [ended["first"]])}
            if ended["state"] in _WRITTEN_ENDS and whole and named <= {end["rank"] for end in ended["ranks"]}:
                return ended
        except (TypeError, KeyError):
            pass
        raise damaged(path, "it does not say how the run ended")

    def processes(self) -> dict[str, Any] | None:
        """`pids.json` with identities: `supervisor`, and `ranks` in order; None before the run has started."""
        path = self.path / "pids.json"
        found = read_json(path)
        if found is None:
            return None
        try:
            return {"supervisor": Identity.from_list(found["supervisor"]),
                    "ranks": [Identity.from_list(values) for values in found["ranks"]]}
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise damaged(path, "it names no processes") from error

    def vanished(self) -> str | None:
        """Why nobody will ever write this run's exit.json, as a sentence; None while somebody may, or did."""
        processes = self.processes()
        if processes is not None:
            supervisor = processes["supervisor"]
            if supervisor.lives() or self.exit() is not None:
                return None
            return (f"its supervisor (process {supervisor.pid}) vanished without writing the run's end, "
                    f"most likely killed; its ranks ended with it")
        starter = self._starter()
        age = time.time() - self.info()["created"] / 1e9
        if starter is None or starter.lives() or age < _STARTING_SECONDS:
            return None
        if self.exit() is not None or self.processes() is not None:
            return None
        return f"the process that was to start it (process {starter.pid}) ended before the run began"

    def _starter(self) -> Identity | None:
        path = self.path / "starter.json"
        found = read_json(path)
        try:
            return None if found is None else Identity.from_list(found)
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise damaged(path, "it names no process") from error

    def state(self) -> str:
        """One of STATES, from the files and from whether the supervisor lives."""
        try:
            return self._state()
        except RunError:
            return DAMAGED

    def damage(self) -> str | None:
        """Why the run is damaged, as a sentence; None where its state can be told."""
        try:
            self._state()
        except RunError as error:
            return str(error)
        return None

    def _state(self) -> str:
        _ = self.spec
        ended = self.exit()
        if ended is not None:
            return str(ended["state"])
        if self.vanished() is not None:
            return "failed"
        ended = self.exit()  # it may have come to its end between the two looks
        if ended is not None:
            return str(ended["state"])
        if self.stop_request() is not None:
            return "stopping"
        processes = self.processes()
        if processes is None or not processes["ranks"]:
            return "restarting" if self.restarts() else "starting"
        return "paused" if self._paused() else "running"

    def _paused(self) -> bool:
        """True where every rank waits because somebody asked for it, and none is about to go on."""
        wish = wishes.read_pause(self.control)
        if not wish.asked:
            return False
        pages = map(self.standing, range(self.world_size))
        return all(page is not None and page.phase == wishes.PAUSED and wish.holds(page.step) for page in pages)

    def request_stop(self, grace: float) -> None:
        """Asks the run to end: ranks at the end of their step, the supervisor by force after `grace` seconds."""
        asked = self.stop_request()
        if asked is None or grace < asked:
            try:
                write_json(self.path / "control" / "stop", {"grace": grace})
            except OSError as error:
                raise RunError(f"run {self.path} cannot be asked to stop: {error.strerror} on control/stop; "
                               f"only its owner may, on a disk that is not full") from error

    def stop_request(self) -> float | None:
        """Seconds of grace of the stop that was asked for, None before. Any file there asks: `touch` does as well."""
        path = self.path / "control" / "stop"
        try:
            found = read_json(path)
            return None if found is None else float(found["grace"])
        except (RunError, TypeError, KeyError, ValueError):
            return STOP_SECONDS

    def require_private(self) -> None:
        """RunError unless this user alone could have written here: what comes next unpickles."""
        found = self.path.stat()
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid() or mode & 0o077:
            raise RunError(f"results of run {self.path} are not loaded: the directory belongs to user "
                           f"{found.st_uid} with mode {mode:04o}, and unpickling what another user could have "
                           f"written would run their code; it must belong to you ({os.geteuid()}) with mode 0700")


def runs_root() -> Path:
    """Folder of this user's runs: `DPLAB_RUNS`, else `dplab/runs` in the user's data folder. UsageError where that
    cannot be a folder."""
    given = os.environ.get("DPLAB_RUNS")
    try:
        if given:
            root = Path(given).expanduser().absolute()
        else:
            root = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "dplab" / "runs"
    except RuntimeError as error:
        raise UsageError(f"the folder of runs cannot be told: {given or '~'} names no home directory; "
                         f"set DPLAB_RUNS to a folder") from error
    require_folder(root)
    return root


def require_folder(root: Path) -> None:
    """UsageError where something that is no folder is in the way of `root`; it need not be there yet."""
    try:
        there = next(path for path in (root, *root.parents) if path.exists())
        if there.is_dir():
            return
        what = f"{there} is a file"
    except OSError as error:      # a name too long, a folder that may not be entered
        what = f"{root} cannot be looked at ({error.strerror})"
    raise UsageError(f"{what}, runs need a folder; set DPLAB_RUNS or root to one")


def require_run(path: Path) -> RunDirectory:
    """The run directory at `path`; UsageError or RunError where it is none."""
    if not str(path):
        raise UsageError("an empty path is not a run; give a run's directory or id")
    directory = RunDirectory(path)
    directory.info()
    return directory
