"""Models small enough to learn on a laptop, written plainly. `forward(x, y)` is a loss, `forward(x)` logits.

Each model names in `shard_units` the module classes whose weights ZeRO-3 gathers together.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dplab.errors import UsageError
from dplab.workloads.catalog import workload


class Attention(nn.Module):
    """Causal self-attention of (batch, sequence, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A GPT over `vocabulary` tokens. Bytes use the first 256 rows; a larger table is weight to synchronise."""

    shard_units: ClassVar[tuple[type[nn.Module], ...]] = (Block,)

    def __init__(self, *, layers: int = 4, width: int = 128, heads: int = 4, sequence: int = 128,
                 vocabulary: int = 256) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(f"a GPT of width {width} cannot be cut into {heads} heads; "
                             f"choose heads that divide the width")
        self.sequence = sequence
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._start)
        for name, param in self.named_parameters():
            if name.endswith(("out.weight", "mlp.2.weight")):
                nn.init.normal_(param, std=0.02 / (2 * layers) ** 0.5)  # the residual stream keeps its scale

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats a token of targets `y`, else logits (batch, sequence, vocabulary)."""
        if x.shape[1] > self.sequence:
            raise UsageError(f"a batch of {x.shape[1]} tokens a sequence does not fit this GPT; "
                             f"it was built for at most {self.sequence}")
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(h)))
        return _loss_or_logits(logits, y)


class MLP(nn.Module):
    """Fully connected layers on flattened images."""

    shard_units: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    def __init__(self, *, inputs: int = 64, width: int = 256, layers: int = 3, classes: int = 10) -> None:
        super().__init__()
        widths = [inputs, *[width] * (layers - 1)]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Mean cross entropy of the classes `y`, else logits (batch, classes)."""
        h = x.flatten(1)
        for layer in self.hidden:
            h = F.relu(layer(h))
        return _loss_or_logits(self.head(h), y)


class Residual(nn.Module):
    """Two convolutions around a skip. Group norm keeps ranks independent: batch norm's statistics would not."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(h)))


class CNN(nn.Module):
    """A small residual network on (batch, 1, height, width) images."""

    shard_units: ClassVar[tuple[type[nn.Module], ...]] = (Residual,)

    def __init__(self, *, channels: int = 32, layers: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(layers)))
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Mean cross entropy of the classes `y`, else logits (batch, classes)."""
        return _loss_or_logits(self.head(self.blocks(self.stem(x)).mean((2, 3))), y)


class Wait(torch.autograd.Function):
    """Takes as long as it is told, twice that backward, and hands on what it gets; its weight's gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, torch.zeros_like(ctx.saved_tensors[0]), None


class WaitingLayer(nn.Module):
    """`parameters` weights that are real, and a computation that only takes its time."""

    def __init__(self, parameters: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Wait.apply(x, self.weight, self.seconds)  # type: ignore[no-any-return, no-untyped-call]


class Paced(nn.Module):
    """Emulated compute: the layers between a small embedding and a head wait as a CPU waits for its GPU.

    Their weights are laid out, reduced, gathered and stepped like any; so what emulated links do to a step shows with
    more ranks than cores, and on a busy machine. Forward takes `forward_ms` a layer, backward twice that.
    """

    shard_units: ClassVar[tuple[type[nn.Module], ...]] = (WaitingLayer,)

    def __init__(self, *, layers: int = 8, parameters: int = 2**20, forward_ms: float = 5.0, width: int = 32,
                 sequence: int = 128, vocabulary: int = 256) -> None:
        super().__init__()
        self.sequence = sequence
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(WaitingLayer(parameters, forward_ms / 1e3) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats a token of targets `y`, else logits (batch, sequence, vocabulary)."""
        return _loss_or_logits(self.head(self.layers(self.tokens(x))), y)


def _loss_or_logits(logits: Tensor, y: Tensor | None) -> Tensor:
    return logits if y is None else F.cross_entropy(logits.flatten(0, -2), y.flatten())


def build(name: str, **overrides: Any) -> nn.Module:
    """A model by its name in the catalog, with its defaults or yours: `build("tiny-gpt", layers=2)`.

    Seed torch before it. Raises UsageError for a name or an option that is not known.
    """
    entry = workload(name)
    try:
        model: nn.Module = globals()[entry.model](**{**entry.options, **overrides})
    except TypeError as error:
        raise UsageError(f"model {name!r} cannot be built with {overrides}: {error}") from error
    return model
