"""A model as the planner sees it: repeated blocks, what stands outside them, and their FLOPs.

Shapes only, so a profile comes from a card, from any Hugging Face config.json (see `configs`) or from a handful
of numbers, without building the model. FLOPs count a multiply-add as two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PRODUCTS_AGAIN = 0.4
"""Share of a layer's products that every second one, in order, makes: 0.37 in a Llama 3 block, 0.42 in a GPT's."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """`layers` equal transformer layers over `tokens` tokens a sample; `parameters` is one layer's count.

    `attends` tokens are looked at by each token (the sequence itself; a window where attention slides);
    `crosses` is the length of the other sequence in cross-attention, 0 without.
    """

    layers: int
    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    parameters: int
    dropout: bool = False
    causal: bool = True
    crosses: int = 0

    @property
    def inner(self) -> int:
        """Width of the queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> int:
        """Elements of one layer's weight matrices."""
        attention = 2 * self.hidden * (self.inner + self.kv) * (2 if self.crosses else 1)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    def matmul_flops(self) -> float:
        """Forward FLOPs of one layer's weight matrices for one sample."""
        return 2.0 * self.tokens * self.matrices

    def attention_flops(self, *, causal: bool = False) -> float:
        """Forward FLOPs of scores and context for one sample; `causal` counts only what a mask leaves."""
        own = 4.0 * self.tokens * self.tokens * self.inner * (0.5 if causal and self.causal else 1.0)
        return own + 4.0 * self.tokens * self.crosses * self.inner


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model's shape. `first` and `last` are parameters outside the blocks: embedding, and final norm with head.

    `vocabulary` is the width of the logits (0: none). Convolutional nets have no blocks: their forward FLOPs and
    stored elements a sample are stated. `sequence` is tokens a sample, 1 for images.
    """

    name: str
    kind: str
    sequence: int
    blocks: tuple[Block, ...]
    first: int
    last: int
    vocabulary: int
    tied: bool = False
    stated_flops: float = 0.0
    stated_elements: float = 0.0
    stated_parameters: int = 0
    published_parameters: int | None = None
    source: str = ""

    @property
    def layers(self) -> int:
        """Layers of all blocks."""
        return sum(block.layers for block in self.blocks)

    @property
    def parameters(self) -> int:
        """All trainable parameters, a tied weight once."""
        return sum(block.layers * block.parameters for block in self.blocks) + (
            self.first + self.last + self.stated_parameters)

    @property
    def hidden(self) -> int:
        """Width of the residual stream (1 without blocks)."""
        return self.blocks[-1].hidden if self.blocks else 1

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest part that is gathered together: a layer, the embedding or the head."""
        return max([block.parameters for block in self.blocks] + [self.first, self.last, self.stated_parameters // 8])

    @property
    def pipelines(self) -> bool:
        """True where stages can be cut: one kind of block."""
        return len(self.blocks) == 1

    def head_flops(self) -> float:
        """Forward FLOPs of the logits for one sample."""
        return 2.0 * self.blocks[-1].tokens * self.hidden * self.vocabulary if self.blocks else 0.0

    def forward_flops(self, *, causal: bool = False) -> float:
        """FLOPs of one sample's forward."""
        inside = sum(block.layers * (block.matmul_flops() + block.attention_flops(causal=causal))
                     for block in self.blocks)
        return inside + self.head_flops() + self.stated_flops

    def model_flops(self, *, causal: bool = False) -> float:
        """FLOPs of one sample's forward and backward, no recomputation: what MFU counts.

        Equals 72 L s h^2 (1 + s/(6h) + V/(12Lh)) for a GPT (Narayanan et al. 2021, arXiv:2104.04473, without
        its recomputation). `causal=True` counts half the attention, as some publishers do.
        """
        return 3.0 * self.forward_flops(causal=causal)

    def hardware_flops(self, recompute: str = "none", *, causal: bool = False) -> float:
        """FLOPs of one sample including what `recompute` (of RECOMPUTE) runs twice: what HFU counts."""
        attention = sum(block.layers * block.attention_flops(causal=causal) for block in self.blocks)
        products = sum(block.layers * block.matmul_flops() for block in self.blocks)
        inside = attention + products
        again = {"none": 0.0, "selective": attention, "full": inside, "products": PRODUCTS_AGAIN * products,
                 "alternate": inside / 2}[recompute]
        return self.model_flops(causal=causal) + again

    def flops_per_token(self, *, causal: bool = False) -> float:
        """`model_flops` a token (a sample for images)."""
        return self.model_flops(causal=causal) / self.sequence

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"name": self.name, "kind": self.kind, "parameters": self.parameters, "layers": self.layers,
                "hidden": self.hidden, "sequence": self.sequence, "vocabulary": self.vocabulary,
                "flops_per_token": self.flops_per_token()}

    def __str__(self) -> str:
        per = "token" if self.sequence > 1 else "sample"
        return (f"{self.name}: {self.parameters:,} parameters, {self.layers} layers x {self.hidden}, sequence "
                f"{self.sequence}, {self.flops_per_token():.4g} FLOPs a {per} (forward and backward, no recomputation)")
