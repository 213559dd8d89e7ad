"""The run directory: where each file of a run lies, how it is written whole, and what state the run is in.

    run.json            what was asked: spec, versions, schema
    starter.json        the process from which the supervisor comes
    pids.json           supervisor and ranks, each pid with its creation time
    exit.json           how the run ended; absent while it runs
    control/stop        somebody asked the run to end
    rank-<r>/           events.jsonl, utilization.jsonl, stdout.log, stderr.log, state, result.pkl, error.json

The directory is private to its owner (0700, files 0600). Files that tell of an end (`exit.json`, `error.json`)
are written into space reserved at the start, so that a full disk cannot silence the reason of a failure.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from dplab.errors import RunError, UsageError
from dplab.specs import RunSpec
from dplab.telemetry.events import SCHEMA
from dplab.telemetry.process import Identity

RESERVED_BYTES = 32 * 1024
"""Size of the reserved space of an end file; longer texts lose their middle."""

ENDED = ("finished", "failed", "stopped")
STATES = ("starting", "running", "stopping", *ENDED)

_STARTING_SECONDS = 5.0
"""How long a run whose starter is gone may still be on its way to its first pids.json."""


class RunDirectory:
    """One run's directory; everything another process may know about the run is read through this."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    def rank(self, rank: int) -> Path:
        """Directory of one rank."""
        return self.path / f"rank-{rank}"

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
        """`run.json`; RunError where there is none or a newer version of dplab wrote it."""
        info = read_json(self.path / "run.json")
        if info is None:
            what = "does not exist" if not self.path.exists() else "holds no run.json"
            raise RunError(f"{self.path} is not a run directory: it {what}; "
                           f"give a directory that dplab.launch made, or an id that dplab.runs() lists")
        if not isinstance(info, dict) or "spec" not in info:
            raise RunError(f"{self.path} is not a run directory: its run.json is not one of dplab's; "
                           f"give a directory that dplab.launch made")
        if info.get("schema", 0) > SCHEMA:
            raise RunError(f"run {self.path} was written with schema {info['schema']}, this dplab reads up to "
                           f"{SCHEMA}; read it with the dplab that wrote it ({info.get('versions', {}).get('dplab')})")
        return info

    @property
    def spec(self) -> RunSpec:
        """What `launch` was asked for."""
        return RunSpec.from_dict(self.info()["spec"])

    def exit(self) -> dict[str, Any] | None:
        """`exit.json`, None before the end."""
        found: dict[str, Any] | None = read_json(self.path / "exit.json")
        return found

    def processes(self) -> dict[str, Any] | None:
        """`pids.json` with identities: `supervisor`, and `ranks` in order; None before the run has started."""
        found = read_json(self.path / "pids.json")
        if found is None:
            return None
        return {"supervisor": Identity.from_list(found["supervisor"]),
                "ranks": [Identity.from_list(values) for values in found["ranks"]]}

    def vanished(self) -> str | None:
        """Why nobody will ever write this run's exit.json, as a sentence; None while somebody may, or did."""
        processes = self.processes()
        if processes is not None:
            supervisor = processes["supervisor"]
            if supervisor.lives() or self.exit() is not None:
                return None
            return (f"its supervisor (process {supervisor.pid}) vanished without writing the run's end, "
                    f"most likely killed; its ranks ended with it")
        starter = read_json(self.path / "starter.json")
        age = time.time() - self.info().get("created", 0) / 1e9
        if starter is None or Identity.from_list(starter).lives() or age < _STARTING_SECONDS:
            return None
        if self.exit() is not None or self.processes() is not None:
            return None
        return f"the process that was to start it (process {starter[0]}) ended before the run began"

    def state(self) -> str:
        """One of STATES, from the files and from whether the supervisor lives."""
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
        return "running" if processes is not None and processes["ranks"] else "starting"

    def request_stop(self, grace: float) -> None:
        """Asks the run to end: ranks at the end of their step, the supervisor by force after `grace` seconds."""
        if self.stop_request() is None or grace < self.stop_request()["grace"]:  # type: ignore[index]
            try:
                write_json(self.path / "control" / "stop", {"grace": grace})
            except OSError as error:
                raise RunError(f"run {self.path} cannot be asked to stop: {error.strerror} on control/stop; "
                               f"only its owner may, on a disk that is not full") from error

    def stop_request(self) -> dict[str, Any] | None:
        """What `request_stop` left, None before."""
        found: dict[str, Any] | None = read_json(self.path / "control" / "stop")
        return found

    def require_private(self) -> None:
        """RunError unless this user alone could have written here: what comes next unpickles."""
        found = self.path.stat()
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid() or mode & 0o077:
            raise RunError(f"results of run {self.path} are not loaded: the directory belongs to user "
                           f"{found.st_uid} with mode {mode:04o}, and unpickling what another user could have "
                           f"written would run their code; it must belong to you ({os.geteuid()}) with mode 0700")


def runs_root() -> Path:
    """Folder of this user's runs: `DPLAB_RUNS`, else `dplab/runs` in the user's data folder."""
    if os.environ.get("DPLAB_RUNS"):
        return Path(os.environ["DPLAB_RUNS"]).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "dplab" / "runs"


def read_json(path: Path) -> Any:
    """A JSON file's value, None where there is no file; files are renamed into place, so never half."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; only the run's owner may") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise RunError(f"{path} is not JSON ({error}); the run directory is damaged") from error


def write_json(path: Path, value: Any) -> None:
    """Writes a private file whole: another process sees the old one or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def reserve(path: Path) -> None:
    """Takes the disk space in which `write_reserved` will write `path`."""
    handle = os.open(_reserved(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, b" " * RESERVED_BYTES)  # written, not only allocated: every file system honours that
    finally:
        os.close(handle)


def write_reserved(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON object into the space reserved for `path`; texts that do not fit lose their middle."""
    text = json.dumps(value)
    excess = len(text) - RESERVED_BYTES
    for key in [key for key in value if isinstance(value[key], str) and excess > 0]:
        keep = max(len(value[key]) - excess, 2048) // 4  # a quarter at each end: escapes may double a character
        if 2 * keep < len(value[key]):
            value = {**value, key: f"{value[key][:keep]}\n[...]\n{value[key][-keep:]}"}
            text = json.dumps(value)
            excess = len(text) - RESERVED_BYTES
    try:
        handle = os.open(_reserved(path), os.O_WRONLY)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        write_json(path, value)  # used up by an earlier end
        return
    try:
        os.write(handle, text.encode())
        os.ftruncate(handle, len(text.encode()))
    finally:
        os.close(handle)
    os.replace(_reserved(path), path)


def release(path: Path) -> None:
    """Gives back the space of an end that did not come."""
    _reserved(path).unlink(missing_ok=True)


def _reserved(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")


def require_run(path: Path) -> RunDirectory:
    """The run directory at `path`; UsageError or RunError where it is none."""
    if not str(path):
        raise UsageError("an empty path is not a run; give a run's directory or id")
    directory = RunDirectory(path)
    directory.info()
    return directory
