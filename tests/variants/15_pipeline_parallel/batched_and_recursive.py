"""Messages by batch_isend_irecv, gradients by torch.autograd.grad, and schedules from their closed formulas."""

import torch
import torch.distributed as dist
from torch import nn

from shared.schedules import Action
from solutions import pipeline as ours


def alternate(forwards, backwards, warm_up):
    if not forwards:
        return list(backwards)
    if warm_up:
        return [forwards[0], *alternate(forwards[1:], backwards, warm_up - 1)]
    return [forwards[0], backwards[0], *alternate(forwards[1:], backwards[1:], 0)]


def under_limit(stages, micro_batches, limit):
    """Keep, for every stage, what has arrived and when, and jump from one moment to the next."""
    schedule = [[] for _ in range(stages)]
    inbox = [{"F": [], "B": []} for _ in range(stages)]
    inbox[0]["F"] = [0] * micro_batches
    moments, free, held = {0}, [0] * stages, [0] * stages
    while moments:
        now = min(moments)
        moments.remove(now)
        for stage in range(stages):
            if free[stage] > now:
                continue
            for kind in "BF":
                arrived = inbox[stage][kind]
                if not arrived or arrived[0] > now or (kind == "F" and held[stage] == limit):
                    continue
                arrived.pop(0)
                number = sum(action[0] == kind for action in schedule[stage])
                schedule[stage].append((kind, number, 0))
                free[stage] = now + "FB".index(kind) + 1
                held[stage] += 1 if kind == "F" else -1
                moments.add(free[stage])
                if kind == "F" and stage == stages - 1:
                    inbox[stage]["B"].append(free[stage])
                elif kind == "F":
                    inbox[stage + 1]["F"].append(free[stage])
                elif stage:
                    inbox[stage - 1]["B"].append(free[stage])
                break
    return schedule


def one_f_one_b(stages, micro_batches):
    """Emit, at each tick, a backward if one is due, and a forward otherwise."""
    schedule = []
    for stage in range(stages):
        actions, forwards, backwards = [], 0, 0
        while backwards < micro_batches:
            if forwards < micro_batches and forwards - backwards < stages - stage:
                actions.append(Action("F", forwards))
                forwards += 1
            else:
                actions.append(Action("B", backwards))
                backwards += 1
        schedule.append(actions)
    return schedule


def interleaved(stages, micro_batches, chunks):
    if micro_batches % stages:
        raise ValueError(f"{micro_batches} micro-batches, {stages} stages: not a multiple")
    total = micro_batches * chunks

    def nth(number, backward=False):
        sets, rest = divmod(number, stages * chunks)
        chunk, index = divmod(rest, stages)
        kind = "B" if backward else "F"
        return Action(kind, sets * stages + index, chunks - 1 - chunk if backward else chunk)

    schedule = []
    for stage in range(stages):
        first = min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)
        actions = [nth(number) for number in range(first)]
        for number in range(total):
            if first + number < total:
                actions.append(nth(first + number))
            actions.append(nth(number, backward=True))
        schedule.append(actions)
    return schedule


def zero_bubble(stages, micro_batches):
    def of_stage(stage):
        for action in one_f_one_b(stages, micro_batches)[stage]:
            yield action
            if action.kind == "B" and action.micro_batch - stage >= 0:
                yield Action("W", action.micro_batch - stage)
        for index in range(micro_batches - min(stage, micro_batches), micro_batches):
            yield Action("W", index)

    return [list(of_stage(stage)) for stage in range(stages)]


class Neighbors(ours.Neighbors):
    def send(self, kind, tensor):
        if self.stages == 1:
            self.to_itself[kind].append(tensor.clone())
            return
        message = tensor.detach().clone(memory_format=torch.contiguous_format)
        group, peer = self.route(kind)
        operation = dist.P2POp(dist.isend, message, group=group, group_peer=peer, tag="FB".index(kind))
        self.in_flight[kind].append((dist.batch_isend_irecv([operation])[0], message))

    def receive(self, kind, like):
        if self.stages == 1:
            return self.to_itself[kind].popleft()
        received = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        group, peer = self.route(kind, sends=False)
        operation = dist.P2POp(dist.irecv, received, group=group, group_peer=peer, tag="FB".index(kind))
        dist.batch_isend_irecv([operation])[0].wait()
        if kind == "B" and self.in_flight["F"]:
            self.in_flight["F"].popleft()[0].wait()
        return received

    def finish(self):
        for messages in self.in_flight.values():
            for work, _ in messages:
                work.wait()
            messages.clear()


class Chunk(ours.Chunk):
    def run_forward(self, micro_batch, x, loss_of=None):
        leaf = x.clone() if self.is_first else x.detach().clone().requires_grad_()
        output = self(leaf)
        if loss_of is not None:
            output = loss_of(output)
        self.kept[micro_batch] = (leaf, output)
        return output.detach().clone()

    def run_backward(self, micro_batch, gradient):
        leaf, output = self.kept[micro_batch]
        del self.kept[micro_batch]
        trained = list({id(p): p for p in self.parameters() if p.requires_grad}.values())
        wanted = trained + ([leaf] if leaf.requires_grad else [])
        if not wanted:
            return None
        found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        for parameter, own in zip(trained, found, strict=False):
            if own is not None:
                parameter.grad = own if parameter.grad is None else parameter.grad + own
        return found[-1] if leaf.requires_grad else None


class Pipeline(ours.Pipeline):
    def run(self, action, inputs, targets):
        chunk, is_last = self.chunks[action.chunk], self.position_of(action) == self.last
        is_first = self.position_of(action) == 0
        if action.kind == "F":
            arrived = inputs[action.micro_batch] if is_first else self.input_of(action)
            target = targets[action.micro_batch]
            loss_of = (lambda output: self.loss_fn(output, target).div(len(targets))) if is_last else None
            output = chunk.run_forward(action.micro_batch, arrived, loss_of)
            self.losses.append(output) if is_last else self.send_output(action, output)
            return
        like = chunk.kept[action.micro_batch][1]
        gradient = chunk.run_backward(action.micro_batch, None if is_last else self.neighbors.receive("B", like))
        if not is_first:
            self.neighbors.send("B", gradient)

    def sum_tied_gradients(self):
        for parameter, stages in self.tied:
            if not parameter.requires_grad:
                continue
            own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            received = {stage: torch.empty_like(own) for stage in stages if stage != self.stage}
            both = [dist.P2POp(dist.isend, own, group=self.group, group_peer=stage) for stage in received]
            both += [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=s) for s, tensor in received.items()]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            received[self.stage] = own
            total = received[stages[0]].clone()
            for stage in stages[1:]:
                total += received[stage]
            parameter.grad = total

    def clip_grad_norm_(self, max_norm):
        elsewhere = {id(parameter) for parameter, stages in self.tied if min(stages) < self.stage}
        counted = [p.grad for p in self.own.values() if p.grad is not None and id(p) not in elsewhere]
        square = sum((gradient.double().norm() ** 2 for gradient in counted), torch.zeros((), dtype=torch.float64))
        square = square.to(self.device)
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(self.own.values(), max_norm, norm)
        return norm
