"""What travels with each launch from the launching process to the supervisor and its ranks.

It goes over a private pipe, never over a file: an environment may hold secrets.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dplab.telemetry.process import LINUX, Identity
from dplab.telemetry.rundir import RunDirectory

CALL = "call.pkl"
"""The call, in the run's directory for as long as the run goes."""
RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "DPLAB_LAUNCHED_SIZE",
    "DPLAB_RUN_DIR", "DPLAB_BACKEND", "DPLAB_STRATEGY", "DPLAB_RENDEZVOUS",
)
"""Variables that place a rank: set by the launcher, never taken over from the launching process."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to start. `launcher` is whose death ends the run, None for a detached one; `threads` a rank; `launched`
    ranks were asked for; `restart` counts its restarts so far."""

    directory: str
    world_size: int
    threads: int
    strategy: str | None
    backend: str | None
    cwd: str
    environ: dict[str, str]
    sys_path: list[str]
    launcher: Identity | None
    function: str
    max_restarts: int = 0
    min_ranks: int | None = None
    launched: int = 0
    restart: int = 0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Job:
        """From `to_json`'s line."""
        values = json.loads(text)
        if values["launcher"] is not None:
            values["launcher"] = Identity.from_list(values["launcher"])
        return cls(**values)

    @property
    def run(self) -> RunDirectory:
        """The run's directory."""
        return RunDirectory(self.directory)

    def rank_directory(self, rank: int) -> Path:
        """Where a rank writes."""
        return self.run.rank(rank)

    def rank_environ(self, rank: int) -> dict[str, str]:
        """A rank's whole environment: the launching process's, and the variables that place it."""
        environ = {name: value for name, value in self.environ.items() if name not in RANK_VARIABLES}
        # One host: processes find each other through a file and talk over loopback, whatever the host's name is.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environ.setdefault(name, "lo" if LINUX else "lo0")
        environ["OMP_NUM_THREADS"] = str(self.threads)
        environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.world_size),
            "TORCHELASTIC_RESTART_COUNT": str(self.restart), "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "DPLAB_LAUNCHED_SIZE": str(self.launched or self.world_size),
            # those who died may have left theirs half written
            "DPLAB_RUN_DIR": self.directory,
            "DPLAB_RENDEZVOUS": self.run.rendezvous + (f"-{self.restart}" if self.restart else ""),
            "DPLAB_BACKEND": self.backend or "",
        }
        if self.strategy is not None:
            environ["DPLAB_STRATEGY"] = self.strategy
        return environ
