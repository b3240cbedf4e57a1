"""Reads the collectives in a compiled program from its HLO, the language of the XLA compiler.

An instruction with a collective is one line, such as

    %all-reduce = f32[256,4096]{1,0} all-reduce(%dot), replica_groups=[8,4]<=[4,8]T(1,0), use_global_device_ids=true, …

It states the shape of the result on one device, and the groups of devices that take part. XLA writes the groups in
three ways: as lists, as numbers that are reshaped and transposed, and as axes of a mesh.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

_OPS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(rf"= (?P<result>.+?) (?P<op>{'|'.join(_OPS)}|(?:{'|'.join(_OPS)})-start)\(")
_TENSOR = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")

_NUMBERS = r"\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"  # 0, 1, 2, … in this shape, with its axes in this order
_AS_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_AS_NUMBERS = re.compile(rf"replica_groups=\[(?P<rows>\d+),(?P<columns>\d+)\]<={_NUMBERS}")
_AS_MESH = re.compile(
    rf"replica_groups=mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\({_NUMBERS}\))? \{{(?P<axes>'[^}}:]*')\}}"
)


@dataclass(frozen=True)
class Instruction:
    """A collective in a program, with the sizes of its full buffer. The numbers in groups count devices of the mesh."""

    op: str
    elements: int
    payload_bytes: int
    groups: list[list[int]]
    tensors: int


def collectives(program: str, devices: int) -> list[Instruction]:
    """Return the collectives of a program that was compiled for a given number of devices.

    Raises:
        ValueError: If an instruction has a form that this module does not know.
    """
    return [_instruction(found, line, devices) for line in program.splitlines() if (found := _INSTRUCTION.search(line))]


def _instruction(found: re.Match, line: str, devices: int) -> Instruction:
    if found["op"].endswith("-start"):
        raise ValueError(f"this program was not compiled for a CPU: it launches {found['op']} and waits for it later")
    groups = _groups(line, devices)
    tensors = _TENSOR.findall(found["result"])
    sizes = [math.prod(map(int, filter(None, shape.split(",")))) for _, shape in tensors]
    payload_bytes = sum(size * _itemsize(dtype) for size, (dtype, _) in zip(sizes, tensors, strict=True))
    parts = len(groups[0]) if found["op"] == "reduce-scatter" else 1  # its result is one shard
    # An all-to-all may have its shards as a tuple, but it still exchanges one tensor.
    count = 1 if found["op"] == "all-to-all" else len(tensors)
    return Instruction(found["op"].replace("-", "_"), parts * sum(sizes), parts * payload_bytes, groups, count)


def _itemsize(dtype: str) -> int:
    bits = _BITS.search(dtype)
    return int(bits[0]) // 8 if bits else 1  # a boolean takes a byte


def _groups(line: str, devices: int) -> list[list[int]]:
    """Return the groups of devices that take part in an instruction. For a permutation, each is a sender and receiver.

    Raises:
        ValueError: If they are written in none of the three ways that this module knows.
    """
    if found := _AS_LISTS.search(line):
        lists = [[int(number) for number in each.split(",")] for each in re.findall(r"\{([\d,]+)\}", found[1])]
        return lists or [list(range(devices))]
    if found := _AS_NUMBERS.search(line):
        return _numbers(found["shape"], found["order"]).reshape(int(found["rows"]), int(found["columns"])).tolist()
    if found := _AS_MESH.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found["mesh"])}
        ids = _numbers(found["shape"] or str(devices), found["order"]).reshape(*sizes.values())
        members = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", found["axes"])]
        others = [axis for axis in range(len(sizes)) if axis not in members]
        return ids.transpose(*others, *members).reshape(-1, math.prod(ids.shape[axis] for axis in members)).tolist()
    raise ValueError(f"the devices of this collective are written in an unknown way: {line.strip()}")


def _numbers(shape: str, order: str | None) -> np.ndarray:
    sizes = [int(size) for size in shape.split(",")]
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose([int(axis) for axis in order.split(",")]) if order else numbers


def axes_of(groups: list[list[int]], shape: tuple[int, ...], names: tuple[str, ...]) -> list[str]:
    """Return the axes of a mesh along which the devices of each group differ."""
    varying = set()
    for group in groups:
        for axis, indices in enumerate(np.unravel_index(group, shape)):
            if len(set(indices.tolist())) > 1:
                varying.add(axis)
    return [names[axis] for axis in sorted(varying)]
