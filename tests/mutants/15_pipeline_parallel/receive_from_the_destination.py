"""Receives from the stage to which messages of the same kind go, which is the right one only with two stages.

caught by: Neighbors · ring
"""

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def receive(self, kind, like):
        if self.stages == 1:
            return super().receive(kind, like)
        received = right.torch.empty(like.shape, dtype=like.dtype, device=like.device)
        group, peer = self.route(kind)
        right.dist.recv(received, group=group, group_src=peer, tag=right.TAGS[kind])
        if kind == "B" and self.in_flight["F"]:
            self.in_flight["F"].popleft()[0].wait()
        return received
