"""Messages between the chunks of a pipeline. The first one announces the shape and the dtype of those that follow."""

from typing import Protocol

import torch
from torch import Tensor

LENGTHS = 6  # the most dimensions of a tensor that a header describes
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Neighbors(Protocol):
    """The messages between a stage and its neighbors: "F" for outputs, "B" for gradients."""

    def send(self, kind: str, tensor: Tensor) -> None: ...

    def receive(self, kind: str, like: Tensor) -> Tensor: ...


class Announcements:
    """Messages with outputs. Before the first one, a chunk announces its shape and dtype to the next chunk.

    Communication: one message per output, and one header per chunk, whenever the batch has another shape or dtype.
    """

    def __init__(self, neighbors: Neighbors):
        self.neighbors = neighbors
        self.announced: dict[int, tuple] = {}  # by chunk: the shape and dtype that the next chunk expects
        self.expected: dict[int, Tensor] = {}  # by chunk: a tensor like those that it receives
        self.circumstances: tuple = ()  # of the last step: on what the shapes and dtypes depend

    def begin_step(self, inputs: Tensor) -> None:
        """Forget the shapes if this step may have others."""
        circumstances = inputs.shape, inputs.dtype, autocast_dtype(inputs.device)
        if circumstances != self.circumstances:
            self.announced, self.expected = {}, {}
        self.circumstances, self.device = circumstances, inputs.device

    def assume(self, chunks: int, output: Tensor) -> None:
        """Send and expect no headers: the outputs of this stage's chunks, and what they receive, are like this one."""
        self.announced = dict.fromkeys(range(chunks), (output.shape, output.dtype))
        self.expected = dict.fromkeys(range(chunks), output)

    def send(self, chunk: int, output: Tensor) -> None:
        """Send an output to the next chunk. Before the first one, send a header that describes it."""
        shape_and_dtype = output.shape, output.dtype
        if chunk not in self.announced:
            self.neighbors.send("F", header_of(output))
            self.announced[chunk] = shape_and_dtype
        if self.announced[chunk] != shape_and_dtype:
            raise ValueError(
                f"a micro-batch has an output of {output.dtype}, shape {list(output.shape)}, but the next stage "
                f"expects {self.announced[chunk]}: pad micro-batches to one shape"
            )
        self.neighbors.send("F", output)

    def receive(self, chunk: int) -> Tensor:
        """Receive the output of the previous chunk. Before the first one, receive a header that describes it."""
        if chunk not in self.expected:
            header = torch.empty(2 + LENGTHS, dtype=torch.int64, device=self.device)
            self.expected[chunk] = tensor_like(self.neighbors.receive("F", header))
        return self.neighbors.receive("F", self.expected[chunk])


def header_of(tensor: Tensor) -> Tensor:
    """Describe a tensor in integers: its dtype, the number of its dimensions, and their lengths."""
    if tensor.dtype not in DTYPES or tensor.dim() > LENGTHS:
        raise TypeError(
            f"a stage cannot send an output of {tensor.dtype} in {tensor.dim()} dimensions: it may be "
            f"of {', '.join(map(str, DTYPES))}, in at most {LENGTHS} dimensions"
        )
    lengths = [*tensor.shape, *[0] * (LENGTHS - tensor.dim())]
    return torch.tensor([DTYPES.index(tensor.dtype), tensor.dim(), *lengths], device=tensor.device)


def tensor_like(header: Tensor) -> Tensor:
    """Allocate a tensor that a header describes."""
    dtype, dimensions, *lengths = header.tolist()
    return torch.empty(lengths[:dimensions], dtype=DTYPES[dtype], device=header.device)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that layers compute in under torch.autocast, or None outside of it."""
    kind = device.type
    is_enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_enabled else None
