"""Keeps one flat tensor per dtype; the inner optimizer updates the slice of each parameter that this rank owns.

Uses torch's reduce-scatter and all-gather, and exchanges dicts that say which rank has which state.
"""

import itertools

import torch
import torch.distributed as dist
from torch import nn

from shared.c10d import all_gather_single, reduce_scatter_single


class _Row:
    """The parameters of one dtype in one flat tensor, their gradients in another, and this rank's slices of both."""

    def __init__(self, parameters, group):
        self.parameters, self.group = parameters, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        ends = [0, *itertools.accumulate(p.numel() for p in parameters)]
        self.spans = list(itertools.pairwise(ends))
        self.shard_size = (ends[-1] + self.size - 1) // self.size
        self.low, self.high = self.rank * self.shard_size, (self.rank + 1) * self.shard_size
        self.values, self.grads = (parameters[0].new_zeros(self.shard_size * self.size) for _ in range(2))
        for p, (begin, end) in zip(parameters, self.spans, strict=True):
            self.values[begin:end] = p.detach().reshape(-1)
            p.data = self.values[begin:end].view(p.shape)
        dist.broadcast(self.values, group=group, group_src=0)
        self.pieces = {}
        for index, (begin, end) in enumerate(self.spans):
            begin, end = max(begin, self.low), min(end, self.high)
            if begin < end:
                self.pieces[index] = nn.Parameter(self.values[begin:end])
        self.mean = None
        self.reset()

    def views(self):
        spans = zip(self.parameters, self.spans, strict=True)
        return [self.grads[begin:end].view(p.shape) for p, (begin, end) in spans]

    def reset(self):
        self.mean = None
        self.grads.zero_()
        for p, view in zip(self.parameters, self.views(), strict=True):
            p.grad = view

    def is_used_up(self):
        in_place = [p.grad is not None and p.grad.data_ptr() == v.data_ptr() for p, v in self._pairs() if p.numel()]
        return any(in_place)

    def _pairs(self):
        return list(zip(self.parameters, self.views(), strict=True))

    def average(self):
        if self.mean is not None and self.is_used_up():
            return
        for p, view in self._pairs():
            if p.grad is None:
                view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad)
            p.grad = view
        self.mean = self.grads.new_empty(self.shard_size)
        reduce_scatter_single(self.mean, self.grads, group=self.group)
        self.mean /= self.size

    def set_gradients(self):
        for index, piece in self.pieces.items():
            begin = max(self.spans[index][0], self.low) - self.low
            piece.grad = self.mean[begin : begin + piece.numel()]

    def all_gather(self):
        all_gather_single(self.values, self.values[self.low : self.high], group=self.group)
        self.mean = None
        for piece in self.pieces.values():
            piece.grad = None


class ZeRO1(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, group=None, **defaults):
        self.group, self.rows, self.spent = group, [], False
        self.inner = optimizer_cls([torch.zeros(0, requires_grad=True)], **defaults)
        self.inner.param_groups.clear()
        super().__init__(params, dict(self.inner.defaults))

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group, pieces = self.param_groups[-1], []
        for dtype in dict.fromkeys(p.dtype for p in group["params"]):
            same = [p for p in group["params"] if p.dtype == dtype]
            for p in same:
                if not p.requires_grad:
                    dist.broadcast(p.detach(), group=self.group, group_src=0)
            if trainable := [p for p in same if p.requires_grad]:
                self.rows.append(_Row(trainable, self.group))
                pieces += self.rows[-1].pieces.values()
        self.inner.add_param_group({**group, "params": pieces})

    def zero_grad(self, set_to_none=True):
        self.spent = False
        for row in self.rows:
            row.reset()

    def _average(self):
        if self.spent and any(row.is_used_up() for row in self.rows):
            raise RuntimeError("zero_grad() must come between a step and the next backward()")
        self.spent = False
        for row in self.rows:
            row.average()

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            self._average()
            for ours, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
                inner.update({key: ours[key] for key in ours if key != "params"})
            for row in self.rows:
                row.set_gradients()
            self.inner.step()
            for row in self.rows:
                row.all_gather()
        self.spent = True
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self._average()
        square = torch.zeros((), dtype=torch.float64, device=self.param_groups[0]["params"][0].device)
        for row in self.rows:
            square += row.mean.double().square().sum()
        dist.all_reduce(square, group=self.group)
        for row in self.rows:
            row.mean *= torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0).to(row.mean.dtype)
        return square.sqrt()

    def state_dict(self, to=None):
        indices, groups = self._with_indices()
        state, wanted = {}, to in (None, dist.get_rank(self.group))
        for row in self.rows:
            own, metadata = {}, {}
            for index, piece in row.pieces.items():
                for name, value in self.inner.state.get(piece, {}).items():
                    sharded = torch.is_tensor(value) and value.shape == piece.shape
                    metadata[indices[row.parameters[index]], name] = value.dtype if sharded else value
                    if sharded:
                        begin = max(row.spans[index][0], row.low) - row.low
                        flat = own.setdefault(name, value.new_zeros(row.shard_size))
                        flat[begin : begin + value.numel()] = value
            gathered = [None] * row.size
            dist.all_gather_object(gathered, metadata, group=self.group)
            metadata = {key: value for one in gathered for key, value in one.items()}
            for name in sorted({name for _, name in metadata}):
                dtypes = [v for (_, n), v in metadata.items() if n == name and isinstance(v, torch.dtype)]
                whole = self._whole(row, own.get(name), dtypes[0], to) if dtypes else None
                for p, (begin, end) in zip(row.parameters, row.spans, strict=True):
                    value = metadata.get((indices[p], name))
                    if wanted:
                        entry = whole[begin:end].reshape(p.shape) if dtypes else value
                        entry = entry.clone() if torch.is_tensor(entry) else entry
                        state.setdefault(indices[p], {})[name] = entry
        for numbered in groups:  # No rank has state for an empty parameter: it takes the step count of any other.
            for index in numbered["params"]:
                entries = state.get(index, {})
                others = [each for each in state.values() if each is not entries]
                for name in [name for name in entries if entries[name] is None]:
                    entries[name] = next(each[name] for each in others if each.get(name) is not None)
        return {"state": dict(sorted(state.items())), "param_groups": groups} if wanted else None

    def _whole(self, row, shard, dtype, to):
        shard = row.values.new_zeros(row.shard_size, dtype=dtype) if shard is None else shard
        if to is None:
            whole = shard.new_empty(row.shard_size * row.size)
            all_gather_single(whole, shard, group=self.group)
            return whole
        shards = [torch.empty_like(shard) for _ in range(row.size)] if row.rank == to else None
        dist.gather(shard, shards, group=self.group, group_dst=to)
        return torch.cat(shards) if shards else None

    def _with_indices(self):
        every = [p for group in self.param_groups for p in group["params"]]
        indices = {p: index for index, p in enumerate(every)}
        groups = []
        for group in self.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": [indices[p] for p in group["params"]]})
        return indices, groups

    def load_state_dict(self, state_dict):
        _, groups = self._with_indices()
        given = state_dict["param_groups"]
        if [len(one["params"]) for one in groups] != [len(one["params"]) for one in given]:
            raise ValueError("these are not the param_groups that this state was saved from")
        every = [p for group in self.param_groups for p in group["params"]]
        order = [index for group in given for index in group["params"]]
        state = {p: state_dict["state"].get(index, {}) for p, index in zip(every, order, strict=True)}
        for p, entries in state.items():
            if any(torch.is_tensor(v) and v.dim() and v.shape != p.shape for v in entries.values()):
                raise ValueError(f"a state of another shape than {tuple(p.shape)}")
        for ours, theirs in zip(self.param_groups, given, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})
        for row in self.rows:
            for index, piece in row.pieces.items():
                p, (begin, _) = row.parameters[index], row.spans[index]
                low = max(begin, row.low) - begin
                mine = self.inner.state[piece] = {}
                for name, value in state[p].items():
                    per_element = torch.is_tensor(value) and value.shape == p.shape and name != "step"
                    if per_element:
                        value = value.reshape(-1)[low : low + piece.numel()].to(piece.device)
                    mine[name] = value.clone() if torch.is_tensor(value) else value
