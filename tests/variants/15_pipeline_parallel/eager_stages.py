"""A pipeline whose first holder of a tied weight adds up, with schedules that count, and hooks of no kind."""

import torch
import torch.distributed as dist

from shared.schedules import Action
from solutions import pipeline as ours


def alternate(forwards, backwards, warm_up):
    """Let each forward after the warm-up bring a backward with it."""
    actions, waiting = [], list(backwards)
    for number, forward in enumerate(forwards):
        actions.append(forward)
        if number >= warm_up:
            actions.append(waiting.pop(0))
    return actions + waiting


def under_limit(stages, micro_batches, limit):
    """Advance all stages by one unit of time, with no more than one running action each."""
    running, schedule = [None] * stages, [[] for _ in range(stages)]
    finished = [{"F": 0, "B": 0} for _ in range(stages)]
    started = [{"F": 0, "B": 0} for _ in range(stages)]

    def choose(stage):
        begun, above = started[stage], finished[stage - 1] if stage else {"F": micro_batches}
        due = finished[stage + 1]["B"] if stage + 1 < stages else finished[stage]["F"]
        if begun["B"] < due:
            return "B"
        return "F" if begun["F"] < above["F"] and begun["F"] - begun["B"] < min(limit, stages - stage) else None

    while any(done["B"] < micro_batches for done in finished):
        for stage in range(stages):
            if running[stage] is None and (kind := choose(stage)):
                schedule[stage].append(Action(kind, started[stage][kind]))
                started[stage][kind] += 1
                running[stage] = [kind, 1 if kind == "F" else 2]
        for stage, task in enumerate(running):
            if task is not None:
                task[1] -= 1
                if not task[1]:
                    finished[stage][task[0]] += 1
                    running[stage] = None
    return schedule


def interleaved(stages, micro_batches, chunks):
    """Let each stage run what is next in line, a backward if it has warmed up, and a forward otherwise."""
    if micro_batches % stages != 0:
        raise ValueError(f"expected a multiple of {stages} micro-batches, got {micro_batches}")
    rounds = [range(first, first + stages) for first in range(0, micro_batches, stages)]
    ups = [("F", index, chunk) for group in rounds for chunk in range(chunks) for index in group]
    downs = [("B", index, chunk) for group in rounds for chunk in range(chunks)[::-1] for index in group]
    schedule = []
    for stage in range(stages):
        ahead, actions, done = 2 * (stages - 1 - stage) + stages * (chunks - 1), [], 0
        for number, action in enumerate(ups):
            actions.append(action)
            if number >= ahead:
                actions.append(downs[done])
                done += 1
        schedule.append(actions + downs[done:])
    return schedule


class Neighbors(ours.Neighbors):
    def send(self, kind, tensor):
        if self.stages == 1:
            return super().send(kind, tensor)
        message = tensor.clone(memory_format=torch.contiguous_format)
        ahead = 1 if kind == "F" else self.stages - 1
        peer = (self.stage + ahead) % self.stages
        group = self.groups[kind, self.stage % 2]
        work = dist.isend(message, group=group, group_dst=peer, tag={"F": 7, "B": 8}[kind])
        self.in_flight[kind].append((work, message))

    def receive(self, kind, like):
        if self.stages == 1:
            return super().receive(kind, like)
        behind = self.stages - 1 if kind == "F" else 1
        received = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        peer = (self.stage + behind) % self.stages
        dist.recv(received, group=self.groups[kind, peer % 2], group_src=peer, tag={"F": 7, "B": 8}[kind])
        if kind == "B" and len(self.in_flight["F"]) > 0:
            handle, _message = self.in_flight["F"].popleft()
            handle.wait()
        return received

    def finish(self):
        for handle, _message in (*self.in_flight["F"], *self.in_flight["B"]):
            handle.wait()
        self.in_flight["F"].clear()
        self.in_flight["B"].clear()


class Chunk(ours.Chunk):
    def run_forward(self, micro_batch, x, loss_of=None):
        with torch.enable_grad():
            x = x.detach()
            if not self.is_first:
                x.requires_grad_(True)
            output = self(x)
            output = output if loss_of is None else loss_of(output)
        self.kept[micro_batch] = [x, output]
        return output.data

    def run_backward(self, micro_batch, gradient):
        x, output = self.kept.pop(micro_batch)
        if not output.requires_grad:
            return None
        torch.autograd.backward([output], [torch.ones_like(output) if gradient is None else gradient])
        gradient, x.grad = x.grad, None
        return gradient


class Pipeline(ours.Pipeline):
    def run(self, action, inputs, targets):
        getattr(self, f"run_{action.kind.lower()}")(action, inputs, targets)

    def run_f(self, action, inputs, targets):
        position, index = self.position_of(action), action.micro_batch
        x = inputs[index] if position == 0 else self.input_of(action)
        chunk = self.chunks[action.chunk]
        if position < self.last:
            self.send_output(action, chunk.run_forward(index, x))
        else:
            share = len(targets[index]) / sum(map(len, targets))
            self.losses.append(chunk.run_forward(index, x, lambda y: share * self.loss_fn(y, targets[index])))

    def run_b(self, action, inputs, targets):
        position, index = self.position_of(action), action.micro_batch
        chunk, gradient = self.chunks[action.chunk], None
        if position < self.last:
            gradient = self.neighbors.receive("B", torch.empty_like(chunk.kept[index][1]))
        gradient = chunk.run_backward(index, gradient)
        if position > 0:
            self.neighbors.send("B", gradient)

    def sum_tied_gradients(self):
        """Let the first stage that has a weight add up, and send the sum to the others."""
        for parameter, stages in self.tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            first, *others = stages
            if self.stage == first:
                for stage in others:
                    received = torch.empty_like(parameter)
                    dist.recv(received, group=self.group, group_src=stage)
                    parameter.grad += received
                for stage in others:
                    dist.send(parameter.grad, group=self.group, group_dst=stage)
            else:
                dist.send(parameter.grad, group=self.group, group_dst=first)
                dist.recv(parameter.grad, group=self.group, group_src=first)

    def clip_grad_norm_(self, max_norm):
        twice = [parameter for parameter, stages in self.tied if self.stage in stages[1:]]
        square = torch.zeros(1, dtype=torch.float64, device=self.device)
        for parameter in self.stage_parameters().values():
            if parameter.grad is not None and not any(parameter is other for other in twice):
                square += parameter.grad.double().pow(2).sum()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt().squeeze()
        if norm > max_norm:
            for parameter in self.stage_parameters().values():
                if parameter.grad is not None:
                    parameter.grad.mul_(max_norm / norm)
        return norm


def zero_bubble(stages, micro_batches):
    """Add a W after each B, as soon as more than stage backwards are without one."""
    schedule = []
    for stage, actions in enumerate(ours.one_f_one_b(stages, micro_batches)):
        due, postponed = [], []
        for action in actions:
            postponed.append(Action(*action))
            due += [action[1]] if action[0] == "B" else []
            if len(due) > stage:
                postponed.append(Action("W", due.pop(0)))
        schedule.append(postponed + [Action("W", index) for index in due])
    return schedule
