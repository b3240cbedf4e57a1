"""What a compressor should compute, in one process that knows the gradients of all ranks.

A method describes one kind of compressor: which arguments it takes, how many bytes a bucket costs, how many steps
without new gradients it needs until nothing is unsent, and, unless rounding makes that pointless, what a step computes.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from shared import formulas
from shared.checks.compression.feeding import Setting
from shared.checks.compression.quantizing import BLOCK
from shared.checks.engine.compare import total_of

Unsent = list[torch.Tensor]  # of one bucket, one per rank


def numel_of(setting: Setting, bucket: list[int]) -> int:
    return sum(torch.Size(setting.shapes[index]).numel() for index in bucket)


def matrix_of(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """Return the rows and columns of a parameter that PowerSGD compresses, or None."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = torch.Size(shape).numel() // max(1, rows)
    return (rows, columns) if rank * (rows + columns) < rows * columns else None


@dataclass(frozen=True)
class Int8:
    """Every element is rounded, to a multiple of its block's scale."""

    said: str = "Int8()"
    arguments: tuple = ()
    low_rank: int = 0

    def sent_bytes(self, setting: Setting, bucket: list[int], ranks: int) -> float:
        blocks = math.ceil(max(1, math.ceil(numel_of(setting, bucket) / BLOCK)) / ranks)
        return 2 * (ranks - 1) * blocks * (BLOCK + 4)

    def drains_within(self, setting: Setting) -> int:
        return 8

    def reference(self, setting: Setting) -> None:
        return None


@dataclass(frozen=True)
class TopK:
    """Some elements are sent exactly, and the others not at all."""

    ratio: float
    low_rank: int = 0

    @property
    def said(self) -> str:
        return f"TopK({self.ratio:g})"

    @property
    def arguments(self) -> tuple:
        return (self.ratio,)

    def count(self, numel: int) -> int:
        return max(1, round(self.ratio * numel))

    def sent_bytes(self, setting: Setting, bucket: list[int], ranks: int) -> float:
        element_bytes = max(4, setting.dtype.itemsize) + 4
        return (ranks - 1) * self.count(numel_of(setting, bucket)) * element_bytes

    def drains_within(self, setting: Setting) -> int:
        numels = [numel_of(setting, bucket) for bucket in setting.buckets()]
        return max(math.ceil(numel / self.count(numel)) for numel in numels)

    def reference(self, setting: Setting) -> "TopKReference":
        return TopKReference(setting, self)


@dataclass(frozen=True)
class PowerSGD:
    """Matrices are sent as the product of two thin ones."""

    rank: int

    @property
    def said(self) -> str:
        return f"PowerSGD({self.rank})"

    @property
    def arguments(self) -> tuple:
        return (self.rank,)

    @property
    def low_rank(self) -> int:
        """The rank of the first step's mean gradient, so that any Q to begin with gives the same results."""
        return self.rank

    def sent_bytes(self, setting: Setting, bucket: list[int], ranks: int) -> float:
        elements = 0
        for index in bucket:
            matrix = matrix_of(setting.shapes[index], self.rank)
            elements += self.rank * sum(matrix) if matrix else torch.Size(setting.shapes[index]).numel()
        return formulas.all_reduce_sent_bytes(elements * max(4, setting.dtype.itemsize), ranks)

    def drains_within(self, setting: Setting) -> int:
        matrices = [matrix for shape in setting.shapes if (matrix := matrix_of(shape, self.rank))]
        return max([math.ceil(min(matrix) / self.rank) + 2 for matrix in matrices], default=1)

    def reference(self, setting: Setting) -> "PowerSGDReference":
        return PowerSGDReference(setting, self)


Method = Int8 | TopK | PowerSGD


@dataclass
class Reference:
    """One process that keeps what every rank has not sent."""

    setting: Setting
    method: Any  # a Method that has this kind of reference
    unsent: dict[int, Unsent] = field(default_factory=dict)  # by the index of the bucket

    def step(self, gradients: list[list[torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Take each rank's gradients, divided by the number of ranks. Returns what each should get, by parameter."""
        results: dict[int, torch.Tensor] = {}
        for number, bucket in enumerate(self.setting.buckets()):
            flats = [torch.cat([own[index].flatten() for index in bucket]) for own in gradients]
            before = self.unsent.get(number, [torch.zeros_like(flat) for flat in flats])
            self.unsent[number] = [kept + flat for kept, flat in zip(before, flats, strict=True)]
            total = self.exchange(number, bucket)
            sizes = [torch.Size(self.setting.shapes[index]) for index in bucket]
            for index, size, part in zip(bucket, sizes, total.split([size.numel() for size in sizes]), strict=True):
                results[index] = part.view(size)
        return results

    def exchange(self, number: int, bucket: list[int]) -> torch.Tensor:
        """Subtract from a bucket's unsent tensors what is sent, and return the sum of that."""
        raise NotImplementedError


class TopKReference(Reference):
    def exchange(self, number: int, bucket: list[int]) -> torch.Tensor:
        total = torch.zeros_like(self.unsent[number][0])
        for unsent in self.unsent[number]:
            indices = unsent.abs().topk(self.method.count(len(unsent))).indices
            total[indices] += unsent[indices]
            unsent[indices] = 0
        return total


@dataclass
class PowerSGDReference(Reference):
    qs: dict[int, torch.Tensor] = field(default_factory=dict)  # by the index of the parameter

    def exchange(self, number: int, bucket: list[int]) -> torch.Tensor:
        sizes, parts = [torch.Size(self.setting.shapes[index]).numel() for index in bucket], []
        of_ranks = [unsent.split(sizes) for unsent in self.unsent[number]]
        for index, own in zip(bucket, zip(*of_ranks, strict=True), strict=True):
            matrix = matrix_of(self.setting.shapes[index], self.method.rank)
            if matrix is None:
                parts.append(total_of(own))
                for each in own:
                    each.zero_()
                continue
            matrices = [each.view(matrix) for each in own]
            if index not in self.qs:
                generator = torch.Generator().manual_seed(1)
                self.qs[index] = torch.randn(matrix[1], self.method.rank, generator=generator).to(own[0])
            p = torch.linalg.qr(total_of(matrices) @ self.qs[index]).Q
            self.qs[index] = total_of(matrices).T @ p
            for each in matrices:
                each -= p @ (p.T @ each)
            parts.append((p @ self.qs[index].T).flatten())
        return torch.cat(parts)
