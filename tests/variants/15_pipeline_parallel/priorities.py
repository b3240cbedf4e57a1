"""Schedules by priorities and iterators, adds tied gradients in the order of stages, and finds actions in a dict."""

import heapq
from collections import deque
from itertools import chain, islice, zip_longest

import torch
import torch.distributed as dist

from shared.schedules import Action
from solutions import neighbors
from solutions import pipeline as right


def _merged(forwards, backwards, ahead):
    forwards, backwards = iter(forwards), iter(backwards)
    begun = list(islice(forwards, ahead))
    rest = chain.from_iterable(zip_longest(forwards, backwards))
    return begun + [action for action in rest if action is not None]


def alternate(forwards, backwards, warm_up):
    return _merged(forwards, backwards, warm_up)


def under_limit(stages, micro_batches, limit):
    """Take the stage that can begin an action first, from a heap of what could begin when."""
    ends, schedule, free, counts = {}, [[] for _ in range(stages)], [0] * stages, [[0, 0] for _ in range(stages)]

    def next_of(stage):
        """Return when a stage can begin its next action, and which: a backward if both can begin then."""
        forward, backward = counts[stage]
        options = []
        source = ("F", backward, stage) if stage == stages - 1 else ("B", backward, stage + 1)
        if backward < forward and source in ends:
            options.append((max(free[stage], ends[source]), 0, "B", backward))
        before = ("F", forward, stage - 1)
        if forward < micro_batches and forward - backward < limit and (not stage or before in ends):
            options.append((max(free[stage], ends.get(before, 0)), 1, "F", forward))
        return min(options, default=None)

    for _ in range(2 * stages * micro_batches):
        when, _, kind, index, stage = min((*option, stage) for stage in range(stages) if (option := next_of(stage)))
        schedule[stage].append(Action(kind, index))
        counts[stage]["FB".index(kind)] += 1
        free[stage] = ends[kind, index, stage] = when + (1 if kind == "F" else 2)
    return schedule


def one_f_one_b(stages, micro_batches):
    kinds = [[Action(kind, index) for index in range(micro_batches)] for kind in "FB"]
    return [_merged(*kinds, ahead=left) for left in reversed(range(stages))]


def interleaved(stages, micro_batches, chunks):
    if micro_batches % stages != 0:
        raise ValueError(f"micro_batches={micro_batches} must be a multiple of {stages}")
    order = sorted(
        ((index // stages, chunk, index) for index in range(micro_batches) for chunk in range(chunks)),
    )
    forwards = [Action("F", index, chunk) for _, chunk, index in order]
    backwards = [Action("B", index, chunks - 1 - chunk) for _, chunk, index in order]
    return [_merged(forwards, backwards, 2 * (stages - 1 - stage) + (chunks - 1) * stages) for stage in range(stages)]


def zero_bubble(stages, micro_batches):
    schedule = []
    for stage in range(stages):
        queue = []
        for time, action in enumerate(one_f_one_b(stages, micro_batches)[stage]):
            heapq.heappush(queue, (time, 0, action.micro_batch, action))
        times = [time for time, _, _, action in sorted(queue) if action.kind == "B"]
        for index in range(micro_batches):
            due = times[index + stage] if index + stage < micro_batches else len(queue)
            heapq.heappush(queue, (due, 1, index, Action("W", index)))
        schedule.append([heapq.heappop(queue)[-1] for _ in range(len(queue))])
    return schedule


class Neighbors(neighbors.Neighbors):
    def send(self, kind, tensor):
        if self.stages < 2:
            self.to_itself[kind].append(tensor)
        else:
            message = tensor.detach().clone(memory_format=torch.contiguous_format)
            group, peer = self.route(kind)
            work = dist.isend(message, group=group, group_dst=peer, tag=neighbors.TAGS[kind])
            self.in_flight[kind].append((work, message))

    def receive(self, kind, like):
        if self.stages < 2:
            return self.to_itself[kind].popleft()
        group, peer = self.route(kind, sends=False)
        received = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        dist.irecv(received, group=group, group_src=peer, tag=neighbors.TAGS[kind]).wait()
        if kind == "B" and len(self.in_flight["F"]):
            self.in_flight["F"].popleft()[0].wait()
        return received

    def finish(self):
        for work, _ in chain(*self.in_flight.values()):
            work.wait()
        self.in_flight = {kind: deque() for kind in self.in_flight}


class Chunk(right.Chunk):
    def run_forward(self, micro_batch, x, loss_of=None):
        x = x.detach() if self.is_first else x.detach().requires_grad_()
        output = self(x)
        if loss_of is not None:
            output = loss_of(output)
        self.kept.setdefault(micro_batch, (x, output))
        return output.detach()

    def run_backward(self, micro_batch, gradient):
        x, output = self.kept.pop(micro_batch)
        if output.grad_fn is not None:
            torch.autograd.backward([output], [gradient])
        return x.grad

    @torch.no_grad()
    def run_weights(self, micro_batch):
        for weight, x, gradient in self.terms.pop(micro_batch, ()):
            rows = gradient.reshape(-1, gradient.shape[-1])
            right.accumulate(weight, torch.einsum("no,ni->oi", rows, x.reshape(-1, x.shape[-1])))


class Pipeline(right.Pipeline):
    def __init__(self, layers, schedule="1f1b", micro_batches=8, *options, **named):
        super().__init__(layers, schedule, micro_batches, *options, **named)
        self.neighbors.__class__ = Neighbors
        for chunk in self.chunks:
            chunk.__class__ = Chunk

    def run(self, action, inputs, targets):
        {"F": self._forward, "B": self._backward}[action.kind](action, inputs, targets)

    def _forward(self, action, inputs, targets):
        position, index = self.position_of(action), action.micro_batch
        x = self.input_of(action) if position else inputs[index]
        if position < self.last:
            self.send_output(action, self.chunks[action.chunk].run_forward(index, x))
            return
        self.losses += [self.chunks[action.chunk].run_forward(index, x, self.loss_of(targets[index]))]

    def _backward(self, action, inputs, targets):
        position, chunk = self.position_of(action), self.chunks[action.chunk]
        gradient = None
        if position != self.last:
            gradient = self.neighbors.receive("B", chunk.kept[action.micro_batch][1])
        gradient = chunk.run_backward(action.micro_batch, gradient)
        if position > 0:
            self.neighbors.send("B", gradient)

    def sum_tied_gradients(self):
        for parameter, stages in self.tied:
            if parameter.requires_grad:
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                parts = {stage: torch.empty_like(mine) for stage in stages} | {self.stage: mine}
                others = [stage for stage in stages if stage != self.stage]
                right.InFlight([(mine, s) for s in others], [(parts[s], s) for s in others], self.group).wait()
                total = torch.zeros_like(mine)
                for stage in sorted(parts):
                    total += parts[stage]
                parameter.grad = total

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        twice = [parameter for parameter, stages in self.tied if min(stages) != self.stage]
        gradients = [(p, p.grad) for p in self.own.values() if p.grad is not None]
        counted = [g for p, g in gradients if not any(p is other for other in twice)]
        squared = sum((g.double().pow(2).sum() for g in counted), torch.zeros((), dtype=torch.float64).to(self.device))
        dist.all_reduce(squared, group=self.group)
        norm = squared**0.5
        for _, gradient in gradients:
            gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm
