"""Sends each shard directly to its owner, has one inner optimizer per flat tensor, and all-gathers around a ring."""

import copy
from types import SimpleNamespace

import torch
import torch.distributed as dist

from solutions import flat as earlier


def flatten_and_broadcast(parameters, group):
    for p in parameters:
        dist.broadcast(p.data, group=group, group_src=0)
    alike = {}
    for p in filter(lambda p: p.requires_grad, parameters):
        alike.setdefault(p.dtype, []).append(p)
    return [earlier.FlatParameter(trained, group) for trained in alike.values()]


class ShardedOptimizer(torch.optim.Optimizer):
    """Has one inner optimizer per param group, and waits for the last all-gather first."""

    def __init__(self, params, optimizer_cls, flatten, group=None, **defaults):
        self.flatten, self.flat_parameters, self.inners = flatten, [], []
        self.make = lambda shards, settings: optimizer_cls([{**settings, "params": shards}], **defaults)
        super().__init__(params, self.make([torch.zeros(1)], {}).defaults)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        added = self.flatten(self.param_groups[-1]["params"])
        self.flat_parameters.extend(added)
        self.inners.append(self.make([each.shard for each in added], self.param_groups[-1]))

    def step(self):
        for group, inner in zip(self.param_groups, self.inners, strict=True):
            shards = inner.param_groups[0]["params"]
            inner.param_groups[0] = {**group, "params": shards}
            inner.step()
            inner.zero_grad()
        in_flight = {each: each.launch_all_gather() for each in self.flat_parameters}
        while in_flight:
            in_flight.popitem()[1].wait()


class ZeRO1(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, group=None, **defaults):
        self.pg = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        probe = torch.nn.Parameter(torch.zeros(1))
        self.make, self.flats, self.stepped, self.reduced = optimizer_cls, [], False, False
        super().__init__(params, optimizer_cls([probe], **defaults).defaults)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group_index, group = len(self.param_groups) - 1, self.param_groups[-1]
        kinds = {}
        for p in group["params"]:
            if p.requires_grad:
                kinds.setdefault((p.dtype, p.device), []).append(p)
            else:
                dist.broadcast(p.data, group=self.pg, group_src=0)
        for parameters in kinds.values():
            self.flats.append(self._lay_out(parameters, group_index))

    def _lay_out(self, parameters, group_index):
        sizes = [p.numel() for p in parameters]
        missing = -sum(sizes) % self.ranks
        values = torch.cat([p.data.reshape(-1) for p in parameters] + [parameters[0].data.new_zeros(missing)])
        grads = torch.zeros_like(values)
        dist.broadcast(values, group=self.pg, group_src=0)
        for p, value, grad in zip(
            parameters, values.split([*sizes, missing]), grads.split([*sizes, missing]), strict=False
        ):
            p.data, p.grad = value.view(p.shape), grad.view(p.shape)
        own = torch.nn.Parameter(values.chunk(self.ranks)[self.rank])
        settings = {name: value for name, value in self.param_groups[group_index].items() if name != "params"}
        inner = self.make([{"params": [own], **settings}])
        slices = [p.grad for p in parameters]
        return SimpleNamespace(
            parameters=parameters,
            sizes=sizes,
            values=values,
            grads=grads,
            own=own,
            inner=inner,
            slices=slices,
            group_index=group_index,
        )

    def zero_grad(self, set_to_none=True):
        self.stepped = self.reduced = False
        for flat in self.flats:
            flat.grads.zero_()
            flat.own.grad = None
            for p, view in zip(flat.parameters, flat.slices, strict=True):
                p.grad = view

    def _reduce(self):
        pairs = [pair for flat in self.flats for pair in zip(flat.parameters, flat.slices, strict=True)]
        here = any(p.grad is view for p, view in pairs)
        if self.stepped:
            if here:
                raise RuntimeError("gradients of the last step are still there: zero_grad() first")
            self.stepped = False
        if self.reduced and here:
            return
        for flat in self.flats:
            for p, view in zip(flat.parameters, flat.slices, strict=True):
                if p.grad is not view:
                    view.zero_() if p.grad is None else view.copy_(p.grad)
                    p.grad = view
            parts = flat.grads.chunk(self.ranks)
            total, arriving = parts[self.rank].clone(), torch.empty_like(parts[self.rank])
            for step in range(1, self.ranks):
                to, source = (self.rank + step) % self.ranks, (self.rank - step) % self.ranks
                take = dist.P2POp(dist.irecv, arriving, group=self.pg, group_peer=source)
                give = dist.P2POp(dist.isend, parts[to], group=self.pg, group_peer=to)
                for work in dist.batch_isend_irecv([take, give]):
                    work.wait()
                total += arriving
            flat.own.grad = total / self.ranks
        self.reduced = True

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self._reduce()
        first = self.param_groups[0]["params"][0]
        square = torch.zeros((), dtype=torch.float64, device=first.device)
        for flat in self.flats:
            square += flat.own.grad.double().pow(2).sum()
        dist.all_reduce(square, group=self.pg)
        norm = square.sqrt()
        if norm > max_norm:
            for flat in self.flats:
                flat.own.grad *= max_norm / (norm.item() + 1e-6)
        return norm

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        with torch.no_grad():
            self._reduce()
            for flat in self.flats:
                for name, value in self.param_groups[flat.group_index].items():
                    if name != "params":
                        flat.inner.param_groups[0][name] = value
                flat.inner.step()
                flat.own.grad = None
                self._pass_around(flat.values.chunk(self.ranks))
        self.stepped, self.reduced = True, False
        return loss

    def _pass_around(self, parts):
        right, left = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        for step in range(self.ranks - 1):
            give, take = parts[(self.rank - step) % self.ranks], parts[(self.rank - step - 1) % self.ranks]
            receive = dist.P2POp(dist.irecv, take, group=self.pg, group_peer=left)
            send = dist.P2POp(dist.isend, give, group=self.pg, group_peer=right)
            for work in dist.batch_isend_irecv([receive, send]):
                work.wait()

    def _groups(self):
        indices, groups = {}, []
        for group in self.param_groups:
            first = len(indices)
            indices.update({p: first + index for index, p in enumerate(group["params"])})
            packed = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            groups.append(packed | {"params": [indices[p] for p in group["params"]]})
        return indices, groups

    @torch.no_grad()
    def state_dict(self, to=None):
        indices, groups = self._groups()
        state = {}
        for flat in self.flats:
            for name, value in flat.inner.state.get(flat.own, {}).items():
                if torch.is_tensor(value) and value.shape == flat.own.shape:
                    entries = self._gather(flat, value, to)
                else:
                    entries = [copy.deepcopy(value) for _ in flat.parameters]
                for p, entry in zip(flat.parameters, entries, strict=False):
                    state.setdefault(indices[p], {})[name] = entry
        return {"state": state, "param_groups": groups} if to in (None, self.rank) else None

    def _gather(self, flat, part, to):
        parts = [torch.empty_like(part) for _ in range(self.ranks)] if to in (None, self.rank) else []
        if to is None:
            dist.all_gather(parts, part, group=self.pg)
        elif to == self.rank:
            for source in range(self.ranks):
                if source == to:
                    parts[source].copy_(part)
                else:
                    dist.recv(parts[source], group=self.pg, group_src=source)
        else:
            dist.send(part, group=self.pg, group_dst=to)
        whole = torch.cat(parts)[: sum(flat.sizes)].split(flat.sizes) if parts else []
        return [one.view(p.shape).clone() for one, p in zip(whole, flat.parameters, strict=False)]

    def load_state_dict(self, state_dict):
        indices, groups = self._groups()
        if len(groups) != len(state_dict["param_groups"]):
            raise ValueError(f"{len(state_dict['param_groups'])} param groups do not fit {len(groups)}")
        renumbered = {}
        for ours, theirs in zip(groups, state_dict["param_groups"], strict=True):
            if len(ours["params"]) != len(theirs["params"]):
                raise ValueError("a param group has another number of parameters")
            renumbered.update(zip(ours["params"], theirs["params"], strict=True))
        found = {p: state_dict["state"].get(renumbered[index], {}) for p, index in indices.items()}
        for p, entries in found.items():
            for name, value in entries.items():
                if name != "step" and torch.is_tensor(value) and value.shape != p.shape:
                    raise ValueError(f"{name} has the shape {tuple(value.shape)}, its parameter {tuple(p.shape)}")
        for group, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(copy.deepcopy({name: value for name, value in theirs.items() if name != "params"}))
        for flat in self.flats:
            mine = flat.inner.state[flat.own] = {}
            for name in dict.fromkeys(name for p in flat.parameters for name in found[p]):
                values = [found[p].get(name) for p in flat.parameters]
                some = next(value for value in values if value is not None)
                if torch.is_tensor(some) and name != "step":
                    whole = torch.zeros_like(flat.values, dtype=some.dtype)
                    if name == "master":
                        whole.copy_(flat.values)
                    for value, piece in zip(
                        values, whole.split([*flat.sizes, len(whole) - sum(flat.sizes)]), strict=False
                    ):
                        if value is not None:
                            piece.copy_(value.reshape(-1))
                    mine[name] = whole.chunk(self.ranks)[self.rank].clone()
                else:
                    mine[name] = copy.deepcopy(some)
