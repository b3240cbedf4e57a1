"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import torch.distributed as dist

from solutions import neighbors, pipeline


def finish_does_not_wait():
    """Forgets the messages in flight without waiting for them.

    caught by: Neighbors · finish
    """

    class Neighbors(neighbors.Neighbors):
        def finish(self):
            for messages in self.in_flight.values():
                dropped.extend(messages)
                messages.clear()

    dropped = []


def receive_always_frees_an_output():
    """Frees an output whenever a gradient arrives, even if none is in flight.

    caught by: Neighbors · freed
    """

    class Neighbors(neighbors.Neighbors):
        def receive(self, kind, like):
            if self.stages == 1:
                return super().receive(kind, like)
            received = neighbors.torch.empty(like.shape, dtype=like.dtype, device=like.device)
            group, peer = self.route(kind, sends=False)
            neighbors.dist.recv(received, group=group, group_src=peer, tag=neighbors.TAGS[kind])
            if kind == "B":
                self.in_flight["F"].popleft()[0].wait()
            return received


def receive_frees_its_own_kind():
    """Frees the oldest message of the kind that arrives, instead of an output when a gradient arrives.

    caught by: Neighbors · freed
    """

    class Neighbors(neighbors.Neighbors):
        def receive(self, kind, like):
            if self.stages == 1:
                return super().receive(kind, like)
            received = neighbors.torch.empty(like.shape, dtype=like.dtype, device=like.device)
            group, peer = self.route(kind, sends=False)
            neighbors.dist.recv(received, group=group, group_src=peer, tag=neighbors.TAGS[kind])
            if self.in_flight[kind]:
                self.in_flight[kind].popleft()[0].wait()
            return received


def receive_frees_the_newest_output():
    """Frees the newest output when a gradient arrives, which may not have been received yet, and keeps the oldest.

    caught by: Neighbors · freed
    """

    class Neighbors(neighbors.Neighbors):
        def receive(self, kind, like):
            if self.stages == 1:
                return super().receive(kind, like)
            received = neighbors.torch.empty(like.shape, dtype=like.dtype, device=like.device)
            group, peer = self.route(kind, sends=False)
            neighbors.dist.recv(received, group=group, group_src=peer, tag=neighbors.TAGS[kind])
            if kind == "B" and self.in_flight["F"]:
                self.in_flight["F"].pop()[0].wait()
            return received


def receive_from_the_destination():
    """Receives from the stage to which messages of the same kind go, which is the right one only with two stages.

    caught by: Neighbors · ring
    """

    class Neighbors(neighbors.Neighbors):
        def receive(self, kind, like):
            if self.stages == 1:
                return super().receive(kind, like)
            received = neighbors.torch.empty(like.shape, dtype=like.dtype, device=like.device)
            group, peer = self.route(kind)
            neighbors.dist.recv(received, group=group, group_src=peer, tag=neighbors.TAGS[kind])
            if kind == "B" and self.in_flight["F"]:
                self.in_flight["F"].popleft()[0].wait()
            return received


def receive_from_world_ranks():
    """Takes the index of the stage that it receives from for a rank of the world.

    caught by: Neighbors · group
    """

    class Neighbors(neighbors.Neighbors):
        def receive(self, kind, like):
            if self.stages == 1:
                return super().receive(kind, like)
            received = neighbors.torch.empty(like.shape, dtype=like.dtype, device=like.device)
            group, peer = self.route(kind, sends=False)
            neighbors.dist.recv(received, src=peer, group=group, tag=neighbors.TAGS[kind])
            if kind == "B" and self.in_flight["F"]:
                self.in_flight["F"].popleft()[0].wait()
            return received


def receive_in_another_dtype():
    """Receives into float32.

    caught by: Neighbors · plain messages
    """

    class Neighbors(neighbors.Neighbors):
        def receive(self, kind, like):
            return super().receive(kind, like).float()


def receive_into_what_it_gets():
    """Receives into the tensor that only shows the shape.

    caught by: Neighbors · plain messages
    """

    class Neighbors(neighbors.Neighbors):
        def receive(self, kind, like):
            return like.copy_(super().receive(kind, like))


def receive_keeps_outputs():
    """Keeps all outputs until finish().

    caught by: Neighbors · freed
    """

    class Neighbors(neighbors.Neighbors):
        def receive(self, kind, like):
            kept = list(self.in_flight["F"])
            received = super().receive(kind, like)
            self.in_flight["F"] = neighbors.deque(kept)
            return received


def send_forgets_its_handle():
    """Launches a message and keeps neither its handle nor its tensor.

    caught by: Neighbors · in flight
    """

    class Neighbors(neighbors.Neighbors):
        def send(self, kind, tensor):
            super().send(kind, tensor)
            dropped.extend(self.in_flight[kind])
            self.in_flight[kind].clear()

    dropped = []


def send_to_world_ranks():
    """Takes the index of a stage for a rank of the world.

    caught by: Neighbors · group
    """

    class Neighbors(neighbors.Neighbors):
        def send(self, kind, tensor):
            if self.stages == 1:
                return super().send(kind, tensor)
            message = tensor.contiguous()
            work = dist.isend(message, self.route(kind)[1], tag=neighbors.TAGS[kind])
            self.in_flight[kind].append((work, message))


def send_waits():
    """Waits in send() until the message has been received.

    caught by: Neighbors · at once
    """

    class Neighbors(neighbors.Neighbors):
        def send(self, kind, tensor):
            super().send(kind, tensor)
            if self.in_flight[kind]:
                self.in_flight[kind][-1][0].wait()


def send_without_tags():
    """Sends outputs and gradients with the same tag.

    caught by: Neighbors · plain messages
    """

    class Neighbors(neighbors.Neighbors):
        def send(self, kind, tensor):
            if self.stages == 1:
                return super().send(kind, tensor)
            message = tensor.contiguous()
            group, peer = self.route(kind)
            work = dist.isend(message, group=group, group_dst=peer)
            self.in_flight[kind].append((work, message))

        def receive(self, kind, like):
            if self.stages == 1:
                return super().receive(kind, like)
            received = neighbors.torch.empty_like(like, memory_format=neighbors.torch.contiguous_format)
            group, peer = self.route(kind, sends=False)
            dist.recv(received, group=group, group_src=peer)
            if kind == "B" and self.in_flight["F"]:
                self.in_flight["F"].popleft()[0].wait()
            return received


def chunk_remembers_one_micro_batch():
    """Keeps only the latest micro-batch.

    caught by: Chunk · micro-batches
    """

    class Chunk(pipeline.Chunk):
        def run_forward(self, micro_batch, x, loss_of=None):
            self.kept.clear()
            output = super().run_forward(micro_batch, x, loss_of)
            self.latest = self.kept[micro_batch]
            return output

        def run_backward(self, micro_batch, gradient):
            self.kept[micro_batch] = self.latest
            return super().run_backward(micro_batch, gradient)


def clip_counts_tied_weights_twice():
    """Counts a tied weight on both stages that have it.

    caught by: Pipeline · clipping
    """

    class Pipeline(pipeline.Pipeline):
        def clip_grad_norm_(self, max_norm):
            tied, self.tied = self.tied, []
            norm = super().clip_grad_norm_(max_norm)
            self.tied = tied
            return norm


def clip_leaves_out_tied_weights():
    """Does not scale a tied weight that another stage has counted.

    caught by: Pipeline · clipping
    """

    class Pipeline(pipeline.Pipeline):
        def clip_grad_norm_(self, max_norm):
            kept = [(p, p.grad.clone()) for p, stages in self.tied if stages[0] != self.stage and p.grad is not None]
            norm = super().clip_grad_norm_(max_norm)
            for parameter, gradient in kept:
                parameter.grad = gradient
            return norm


def clip_scales_up():
    """Scales small gradients up.

    caught by: Pipeline · clipping
    """

    class Pipeline(pipeline.Pipeline):
        def clip_grad_norm_(self, max_norm):
            norm = super().clip_grad_norm_(float("inf"))
            for parameter in self.own.values():
                parameter.grad *= max_norm / (norm + 1e-6)
            return norm


def run_expects_gradients_like_inputs():
    """Receives a gradient with the shape of the chunk's input, which may be wider than its output.

    caught by: Pipeline · schedules
    """

    class Pipeline(pipeline.Pipeline):
        def run(self, action, inputs, targets):
            position = self.position_of(action)
            if action.kind == "F" or position == self.last:
                return super().run(action, inputs, targets)
            chunk, index = self.chunks[action.chunk], action.micro_batch
            gradient = chunk.run_backward(index, self.neighbors.receive("B", chunk.kept[index][0]))
            if position:
                self.neighbors.send("B", gradient)


def run_forwards_the_last_chunk_twice():
    """Runs the last chunk once for its output and once more for the loss, so that its forwards take twice as long.

    caught by: Pipeline · one forward
    """

    class Pipeline(pipeline.Pipeline):
        def run(self, action, inputs, targets):
            chunk, index, position = self.chunks[action.chunk], action.micro_batch, self.position_of(action)
            if action.kind == "B":
                super().run(action, inputs, targets)
                return
            x = inputs[index] if position == 0 else self.input_of(action)
            output = chunk.run_forward(index, x)
            if position == self.last:
                self.losses.append(chunk.run_forward(index, x, self.loss_of(targets[index])))
            else:
                self.send_output(action, output)


def run_sends_twice():
    """Sends the gradient of the input twice as large as it is, in float64 pairs.

    caught by: Pipeline · plain model
    """

    class Pipeline(pipeline.Pipeline):
        def run(self, action, inputs, targets):
            if action.kind == "B" and self.position_of(action):
                send = self.neighbors.send
                self.neighbors.send = lambda kind, tensor: send(kind, 2 * tensor)
                super().run(action, inputs, targets)
                self.neighbors.send = send
            else:
                super().run(action, inputs, targets)


def tied_gradients_by_all_reduce():
    """Adds up a tied gradient over all stages, those that do not have it, too.

    caught by: Pipeline · tied wire
    """

    class Pipeline(pipeline.Pipeline):
        def step(self, inputs, targets):
            self.whole = sum(p.numel() for p in self.own.values())
            return super().step(inputs, targets)

        def sum_tied_gradients(self):
            super().sum_tied_gradients()
            for parameter, stages in self.tied:
                others = [stage for stage in stages if stage != self.stage]
                again = [(parameter.grad.clone(), stage) for stage in others]
                pipeline.InFlight(again, [(parameter.grad.clone(), stage) for stage in others], self.group).wait()
