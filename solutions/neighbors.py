# Built by `make notebooks` from source/15_pipeline_parallel/lab.py: edit that, not this.
"""Messages between the stages of a pipeline."""

from collections import deque
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shared.sharded.stages import expect_message

TAGS = {"F": 0, "B": 1}  # outputs of a forward, and gradients of a backward


class Neighbors:
    """The messages between this stage and its neighbors. Sends never wait.

    Communication: one message per send().
    """

    def __init__(self, group: ProcessGroup | None):
        self.stage, self.stages = dist.get_rank(group), dist.get_world_size(group)
        self.groups = dict.fromkeys(product("FB", (0, 1)), group)
        self.in_flight: dict[str, deque[tuple[dist.Work, Tensor]]] = {"F": deque(), "B": deque()}
        self.to_itself = {"F": deque(), "B": deque()}
        if self.stages > 1 and "nccl" in dist.get_backend(group):
            self.connect(dist.get_process_group_ranks(group or dist.group.WORLD))

    def connect(self, members: list[int]) -> None:
        """Give messages of each kind and direction a group of their own, and send the first ones.

        NCCL runs the messages of a group in order, so one that is sent could wait for one that is received. And the
        first message to a rank waits until that rank receives it, so even stages send it first, and odd ones receive.
        """
        self.groups = {key: dist.new_group(members, use_local_synchronization=True) for key in self.groups}
        first = torch.zeros(1, device=torch.accelerator.current_accelerator() or "cpu")
        for kind, sends in product("FB", (self.stage % 2 == 0, self.stage % 2 == 1)):
            group, peer = self.route(kind, sends)
            if sends:
                dist.send(first, group=group, group_dst=peer)
            else:
                dist.recv(first, group=group, group_src=peer)

    def route(self, kind: str, sends: bool = True) -> tuple[ProcessGroup | None, int]:
        """Return the group for messages of a kind, and the stage that they go to (or come from, if sends is False)."""
        peer = (self.stage + (1 if (kind == "F") == sends else -1)) % self.stages
        sender = self.stage if sends else peer
        return self.groups[kind, sender % 2], peer

    def send(self, kind: str, tensor: Tensor) -> None:
        """Launch a message to the next stage ("F") or to the previous one ("B"), without waiting for it."""
        expect_message(tensor)
        if self.stages == 1:
            self.to_itself[kind].append(tensor)
            return
        message = tensor.contiguous()
        group, peer = self.route(kind)
        work = dist.isend(message, group=group, group_dst=peer, tag=TAGS[kind])
        self.in_flight[kind].append((work, message))

    def receive(self, kind: str, like: Tensor) -> Tensor:
        """Wait for the next message from the previous stage ("F") or from the next one ("B")."""
        if self.stages == 1:
            return self.to_itself[kind].popleft()
        received = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        group, peer = self.route(kind, sends=False)
        dist.recv(received, group=group, group_src=peer, tag=TAGS[kind])
        if kind == "B" and self.in_flight["F"]:
            work, _ = self.in_flight["F"].popleft()
            work.wait()
        return received

    def finish(self) -> None:
        """Wait until all messages have been received."""
        for messages in self.in_flight.values():
            while messages:
                work, _ = messages.popleft()
                work.wait()
