"""Codecs that round: bf16, fp16 and int8."""

from __future__ import annotations

import torch

from dplab.layout import ALIGN
from dplab.wire.codec import Quantised

BLOCK = ALIGN
"""Values that share a scale. Every parameter starts a block of its own."""


class Bf16(Quantised):
    """2 bytes a value, 8 bits of mantissa."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        return payload.view(torch.bfloat16).float()


class Fp16(Quantised):
    """2 bytes a value, 11 bits of mantissa, and a power of two for every block of 128, so that nothing overflows."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        blocks = rows.reshape(-1, BLOCK)
        # the largest value of a block lies in [1, 2) afterwards, unless it is not finite
        exponents = torch.frexp(blocks.abs().amax(1, keepdim=True))[1].sub_(1).clamp_(-126, 126)
        scaled = (blocks * _power_of_two(-exponents)).half()
        return _joined(rows, scaled.view(torch.uint8), exponents.to(torch.int16).view(torch.uint8))

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        values, exponents = _parted(payload, 2 * BLOCK, 2)
        scales = _power_of_two(exponents.view(torch.int16).int())
        return values.view(torch.float16).float().mul_(scales).view(-1, n)


class Int8(Quantised):
    """1 byte a value, and an fp32 scale for every block of 128: off by at most a 254th of the block's largest value."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        blocks = rows.reshape(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True).div_(127)
        # a scale that is not finite makes every value of its block so, whatever integer stands beside it
        values = torch.div(blocks, scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return _joined(rows, values.view(torch.uint8), scales.view(torch.uint8))

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        values, scales = _parted(payload, BLOCK, 4)
        return values.view(torch.int8).float().mul_(scales.view(torch.float32)).view(-1, n)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2**exponents as fp32, exactly, for -126 to 127: the bits of such a number are its exponent's."""
    return (exponents + 127 << 23).view(torch.float32)


def _joined(rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, scales], dim=1).view(rows.shape[0], -1)


def _parted(payload: torch.Tensor, values: int, scales: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of values and of scales, a block a row."""
    blocks = payload.reshape(-1, values + scales)
    return blocks[:, :values].contiguous(), blocks[:, values:].contiguous()
