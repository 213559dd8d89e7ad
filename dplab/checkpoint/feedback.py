"""What codecs owe: the part of gradients that was left out on the wire and goes with the next ones.

It is each rank's own, so it goes on from a checkpoint of the same ranks, buckets and codec, and starts at zero under
others; a line says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from dplab.checkpoint.pieces import Path, Piece
from dplab.checkpoint.trained import Trained
from dplab.core.bucket import Bucket
from dplab.telemetry.recorder import now
from dplab.wire.codec import Remembering

if TYPE_CHECKING:
    from dplab.checkpoint.reading import Stored


class Feedback:
    """The memory of `trained`'s codecs."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self._codecs: list[tuple[Bucket, Remembering]] = []
        for bucket in trained.buckets:
            codec: object = None if bucket.grads is None else bucket.grads.codec
            if isinstance(codec, Remembering) and codec.remembers:
                self._codecs.append((bucket, codec))

    def items(self) -> Iterator[Piece]:
        """What this rank writes: all that it remembers."""
        for bucket, codec in self._codecs:
            for name, value in codec.state_dict().items():
                yield Piece.whole(self._path(bucket, name), value)

    def described(self) -> dict[str, Any]:
        """Whose memory it is; empty where nothing is remembered."""
        if not self._codecs:
            return {}
        mesh = self.trained.mesh
        return {"codec": self._codecs[0][1].name, "mesh": [mesh.replicate.size, mesh.shard.size],
                "buckets": [[self.trained.full.plain(name) for name in bucket.names] for bucket, _ in self._codecs]}

    def read(self, stored: Stored, saved: Any) -> int:
        """Goes on from what a checkpoint says was saved, or starts at zero; returns bytes read."""
        for _, codec in self._codecs:
            codec.load_state_dict({})
        if not self._codecs:
            return 0
        if saved != self.described():
            self._say(stored, saved)
            return 0
        nbytes = 0
        for bucket, codec in self._codecs:
            prefix = self._path(bucket, "")[:-1]
            values: dict[str, torch.Tensor] = {}
            for path in stored.under(*prefix):
                shape = stored.shape(path)
                if shape is not None:
                    values[str(path[-1])] = value = torch.empty(shape, dtype=stored.dtype(path), device=bucket.device)
                    nbytes += stored.read_into([Piece.whole(path, value)])
            codec.load_state_dict(values)
        return nbytes

    def _path(self, bucket: Bucket, name: str) -> Path:
        return ("dplab", "feedback", str(self.trained.world.rank), str(bucket.index), name)

    def _say(self, stored: Stored, saved: Any) -> None:
        if self.trained.world.rank == 0:
            has = f"that of {_words(saved)}" if isinstance(saved, dict) and saved else "none"
            text = (f"the codec's error feedback starts at zero: checkpoint {stored.folder} holds {has}, and this is "
                    f"{_words(self.described())}")
            self.trained.recorder.span("log", "feedback", now(), now(), text=text)
            print(f"dplab: {text}", flush=True)


def _words(described: dict[str, Any]) -> str:
    mesh, buckets = described.get("mesh"), described.get("buckets")
    ranks = " x ".join(str(size) for size in mesh if size != 1) if isinstance(mesh, list) else ""
    count = len(buckets) if isinstance(buckets, list) else 0
    return f"{described.get('codec')} on {ranks or 1} ranks with {count} bucket{'' if count == 1 else 's'}"
