"""Everything that leaves a rank: worlds, collectives and the transports below them."""

from dplab.wire.codec import Codec, MakeCodec, Quantised

__all__ = ["Codec", "MakeCodec", "Quantised"]
