"""Uses nothing from the labs: torch's own collectives, its own queue of reductions, and its own unit records.

Its Materializer intersects ranges of elements, and restores the state of the random generator by hand.
"""

import enum
import weakref
import zlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from shared.c10d import all_gather_single, reduce_scatter_single


class State(enum.Enum):
    SHARDED, UNSHARDING, UNSHARDED, BACKWARD = range(4)


class Token:
    """Stands for a call that backward may still reach. It is freed together with the call's graph."""

    seen = False


class FlatParameter:
    """The parameters of one dtype: `whole` is the flat parameter, with or without memory; `shard` is this rank's."""

    def __init__(self, parameters, group, dtype):
        self.parameters, self.group = parameters, group
        self.sizes, self.shapes = [p.numel() for p in parameters], [p.shape for p in parameters]
        self.size = -(-sum(self.sizes) // dist.get_world_size(group))
        values = self.new_flat(parameters[0].dtype)
        for p, piece in zip(parameters, self.cut(values), strict=True):
            piece.copy_(p.detach())
        dist.broadcast(values, group=group, group_src=0)
        self.shard = nn.Parameter(self.shard_of(values).clone(), requires_grad=parameters[0].requires_grad)
        self.whole = self.new_flat(dtype or values.dtype)
        self.alias_parameters()
        self.whole.untyped_storage().resize_(0)
        self.gradients, self.pieces, self.in_flight, self.missing = None, None, None, set(parameters)

    def new_flat(self, dtype):
        numel = self.size * dist.get_world_size(self.group)
        return torch.zeros(numel, dtype=dtype, device=self.parameters[0].device)

    def shard_of(self, flat):
        first = dist.get_rank(self.group) * self.size
        return flat[first : first + self.size]

    def cut(self, flat):
        pieces = flat.split([*self.sizes, flat.numel() - sum(self.sizes)])[: len(self.sizes)]
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def alias_parameters(self):
        for p, piece in zip(self.parameters, self.cut(self.whole), strict=True):
            p.data = piece

    def all_gather(self):
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        shard = self.shard.detach().to(self.whole.dtype)
        return all_gather_single(self.whole, shard, group=self.group, async_op=True), shard

    def pack(self, p):
        if self.gradients is None:
            self.gradients = self.new_flat(self.whole.dtype)
            self.pieces = dict(zip(self.parameters, self.cut(self.gradients), strict=True))
        if p.grad is not None:
            self.pieces[p].copy_(p.grad)
            p.grad = None
        self.missing.discard(p)

    def launch(self, group):
        shard = torch.empty(self.size, dtype=self.gradients.dtype, device=self.gradients.device)
        self.in_flight = reduce_scatter_single(shard, self.gradients, group=group, async_op=True), shard

    def wait_for_reduce(self):
        if self.in_flight is not None:
            work, shard = self.in_flight
            work.wait()
            mean = shard.to(self.shard.dtype) / dist.get_world_size(self.group)
            self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
            self.in_flight = self.gradients = self.pieces = None


class ZeRO3(nn.Module):
    def __init__(self, module, units=None, compute_dtype=None, prefetch=1, reshard_after_forward=True, group=None):
        super().__init__()
        self.module, self.group, self.prefetch, self.stays = module, group, prefetch, not reshard_after_forward
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
        units = self._default_units() if units is None else list(units)
        self.records = []
        for unit, parameters in self._owned(units).items():
            kinds = {}
            for p in parameters:
                kinds.setdefault((p.dtype, p.requires_grad), []).append(p)
            flat_parameters = [FlatParameter(each, group, compute_dtype) for each in kinds.values()]
            record = SimpleNamespace(
                flat_parameters=flat_parameters,
                state=State.SHARDED,
                works=[],
                is_root=unit is module,
                near=set(unit.modules()),
            )
            record.unit, record.calls = unit, weakref.WeakSet()
            self.records.append(record)
            unit.register_forward_pre_hook(lambda *_, record=record: record.owner._pre_forward(record))
            unit.register_forward_hook(lambda _m, _i, output, record=record: record.owner._post_forward(record, output))
        self.shards = nn.ParameterList(
            flat_parameter.shard for record in self.records for flat_parameter in record.flat_parameters
        )
        root = self.records.pop()
        self.queue = [
            s for record in (*self.records[::-1], root) for s in record.flat_parameters if s.shard.requires_grad
        ]
        self.records.append(root)
        self.last_order, self.order, self.sent = [], [], 0
        self._connect()

    def _connect(self):
        for record in self.records:
            record.owner = self
            for flat_parameter in record.flat_parameters:
                for p in flat_parameter.parameters:
                    if p.requires_grad:
                        p.register_post_accumulate_grad_hook(
                            lambda p, record=record, flat_parameter=flat_parameter: self._on_gradient(
                                record, flat_parameter, p
                            )
                        )

    def _default_units(self):
        found, inside = [], set()
        for each in self.module.modules():
            if isinstance(each, nn.ModuleList | nn.Sequential) and each not in inside:
                found += [layer for layer in each if list(layer.parameters())]
                inside.update(each.modules())
        return list(dict.fromkeys(found))

    def _owned(self, units):
        units_around = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            chain = [self.module.get_submodule(".".join(name.split(".")[:n])) for n in range(name.count(".") + 1)]
            nearest = next((each for each in chain[::-1] if each in units), self.module)
            units_around.setdefault(p, set()).add(nearest)
        owned = {each: [] for each in (*units, self.module)}
        for p, around in units_around.items():
            owned[around.pop() if len(around) == 1 else self.module].append(p)
        return owned

    # -- unsharding

    def _unshard(self, record):
        if record.state is State.SHARDED:
            record.works = [flat_parameter.all_gather() for flat_parameter in record.flat_parameters]
            record.state = State.UNSHARDING

    def _wait_for_unshard(self, record):
        self._unshard(record)
        if record.state is State.UNSHARDING:
            for work, _ in record.works:
                work.wait()
            record.works, record.state = [], State.UNSHARDED

    def _reshard(self, record):
        if record.state is State.SHARDED:
            return
        for work, _ in record.works:
            work.wait()
        for flat_parameter in record.flat_parameters:
            flat_parameter.whole.untyped_storage().resize_(0)
        record.works, record.state = [], State.SHARDED

    def _pre_forward(self, record):
        if record.state is State.BACKWARD:
            return
        self._wait_for_unshard(record)
        if not record.is_root:
            self.order.append(record)
            done = len(self.order)
            if [id(p) for p in self.order] == [id(p) for p in self.last_order[:done]]:
                for following in self.last_order[done : done + self.prefetch]:
                    self._unshard(following)

    def _post_forward(self, record, output):
        if record.state is State.BACKWARD:
            return
        if torch.is_grad_enabled():
            token, touched = Token(), []

            def reached(_gradient):
                if not token.seen:
                    token.seen = True
                    record.owner._pre_backward(record, token)

            def watch(tensor):
                if tensor.requires_grad:
                    tensor.register_hook(reached)
                    touched.append(tensor)

            tree_map_only(torch.Tensor, watch, output)
            record.calls |= {token} if touched else set()
        if not torch.is_grad_enabled() or not (record.is_root or self.stays):
            self._reshard(record)

    def _pre_backward(self, record, token):
        for other in self.records:
            near = other.unit in record.near or record.unit in other.near
            if other.state is State.BACKWARD and not near and not other.calls:
                self._post_backward(other)
        record.calls.discard(token)
        if record.state is not State.BACKWARD:
            self._wait_for_unshard(record)
            record.state = State.BACKWARD
        backwards = self.order[::-1]
        if any(each is record for each in backwards):
            following = backwards[[id(p) for p in backwards].index(id(record)) + 1 :]
            for each in [p for p in following if p.calls][: self.prefetch]:
                self._unshard(each)

    def _post_backward(self, record):
        for flat_parameter in record.flat_parameters:
            for p in list(flat_parameter.missing if flat_parameter.shard.requires_grad else ()):
                flat_parameter.pack(p)
        self._launch()
        self._reshard(record)

    # -- gradients

    def _on_gradient(self, record, flat_parameter, p):
        if p not in flat_parameter.missing:
            raise RuntimeError("call finish_gradient_sync() before the next backward()")
        flat_parameter.pack(p)
        self._launch()
        if not any(s.missing or not s.shard.requires_grad for s in record.flat_parameters):
            self._reshard(record)

    def _launch(self):
        while self.sent < len(self.queue) and not self.queue[self.sent].missing:
            if self.sent:
                self.queue[self.sent - 1].wait_for_reduce()
            self.queue[self.sent].launch(self.group)
            self.sent += 1

    def finish_gradient_sync(self):
        for flat_parameter in self.queue:
            for p in list(flat_parameter.missing):
                flat_parameter.pack(p)
        self._launch()
        for flat_parameter in self.queue:
            flat_parameter.wait_for_reduce()
            flat_parameter.missing = set(flat_parameter.parameters)
        self.sent = 0
        for record in self.records:
            self._reshard(record)
            record.calls.clear()

    def forward(self, *inputs, **kwargs):
        if (
            any(len(flat_parameter.missing) < len(flat_parameter.parameters) for flat_parameter in self.queue)
            or self.sent
        ):
            self.finish_gradient_sync()
        for record in self.records:
            self._reshard(record)
        self.last_order, self.order = self.order, []
        output = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            for record in self.records:
                self._reshard(record)
        return output

    # -- the public interface

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        return self.shards.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *_, **__):
        state = {f"part.{index}": shard.detach() for index, shard in enumerate(self.shards)}
        return state | {f"buffer.{name}": buffer for name, buffer in self.module.named_buffers()}

    @torch.no_grad()
    def load_state_dict(self, state):
        for name, value in self.state_dict().items():
            value.copy_(state[name])

    def _flat_parameters(self):
        return [flat_parameter for record in self.records for flat_parameter in record.flat_parameters]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        device = next(iter(self.shards)).device
        square = torch.zeros((), dtype=torch.float64, device=device)
        for shard in self.shards:
            if shard.grad is not None:
                square += shard.grad.double().square().sum()
        dist.all_reduce(square, group=self.group)
        for shard in self.shards:
            if shard.grad is not None:
                shard.grad *= torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0)
        return square.sqrt()

    @torch.no_grad()
    def full_state_dict(self):
        whole = {}
        for flat_parameter in self._flat_parameters():
            flat = flat_parameter.new_flat(flat_parameter.shard.dtype)
            all_gather_single(flat, flat_parameter.shard.detach(), group=self.group)
            whole.update(zip(flat_parameter.parameters, flat_parameter.cut(flat), strict=True))
        return {n: whole.get(v, v).detach().clone() for n, v in self.module.state_dict(keep_vars=True).items()}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict):
        own = self.module.state_dict(keep_vars=True)
        if own.keys() != state_dict.keys() or any(own[n].shape != state_dict[n].shape for n in own):
            raise ValueError("this state was not saved from such a module")
        for record in self.records:
            self._reshard(record)
        names = {value: name for name, value in own.items()}
        for flat_parameter in self._flat_parameters():
            flat = flat_parameter.new_flat(flat_parameter.shard.dtype)
            for p, piece in zip(flat_parameter.parameters, flat_parameter.cut(flat), strict=True):
                piece.copy_(state_dict[names.pop(p)])
            flat_parameter.shard.copy_(flat_parameter.shard_of(flat))
        for buffer, name in names.items():
            buffer.copy_(state_dict[name])

    def sharded_state_dict(self, optimizer):
        state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
        for index, flat_parameter in enumerate(self._flat_parameters()):
            mesh = DeviceMesh.from_group(self.group or dist.group.WORLD, flat_parameter.shard.device.type)
            for name, value in {"": flat_parameter.shard, **optimizer.state.get(flat_parameter.shard, {})}.items():
                if torch.is_tensor(value) and value.shape == flat_parameter.shard.shape:
                    numel = sum(flat_parameter.sizes)
                    left = min(flat_parameter.size, max(0, numel - dist.get_rank(self.group) * flat_parameter.size))
                    value = DTensor.from_local(
                        value.detach()[:left], mesh, [Shard(0)], run_check=False, shape=torch.Size([numel]), stride=(1,)
                    )
                state[f"shelves/{index}/{name}"] = value
        return state


class RowShards:
    """Describes a parameter by its shape in a slot, and copies all of them at once, as FSDP2 does."""

    def __init__(self, parameters, group=None):
        self.parameters, self.group = parameters, group
        self.world_size, me = dist.get_world_size(group), dist.get_rank(group)
        self.rows = [(len(p) + self.world_size - 1) // self.world_size for p in parameters]
        self.shards = [p.detach()[me * n : (me + 1) * n].clone() for p, n in zip(parameters, self.rows, strict=True)]
        self.sizes = [n * p[0].numel() for p, n in zip(parameters, self.rows, strict=True)]

    @torch.no_grad()
    def unshard(self):
        slot = self.copy_in()
        gathered = torch.empty(self.world_size * len(slot), dtype=slot.dtype, device=slot.device)
        all_gather_single(gathered, slot, group=self.group)
        for p in self.parameters:
            p.untyped_storage().resize_(p.numel() * p.element_size())
        self.copy_out(gathered)

    def reshard(self):
        for p in self.parameters:
            p.untyped_storage().resize_(0)

    def copy_in(self):
        slot = torch.zeros(sum(self.sizes), dtype=self.shards[0].dtype, device=self.shards[0].device)
        places = [place[: shard.numel()] for place, shard in zip(slot.split(self.sizes), self.shards, strict=True)]
        torch._foreach_copy_(places, [shard.flatten() for shard in self.shards])
        return slot

    def copy_out(self, gathered):
        padded = [p.new_empty(self.world_size, size) for p, size in zip(self.parameters, self.sizes, strict=True)]
        slots = gathered.view(self.world_size, -1)
        torch.split_with_sizes_copy(slots, self.sizes, dim=1, out=padded)
        for p, rows in zip(self.parameters, padded, strict=True):
            p.view(-1).copy_(rows.view(-1)[: p.numel()])


class Materializer:
    def __init__(self, module, initialize, device, seed=0):
        self.initialize, self.device, self.seed = initialize, torch.device(device), seed
        self.names = {id(tensor): name for name, tensor in module.named_buffers()}
        self.names |= {id(parameter): name for name, parameter in module.named_parameters()}

    def value_of(self, tensor):
        name = self.names[id(tensor)]
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        before = torch.get_rng_state()
        try:
            torch.manual_seed(zlib.crc32(f"{self.seed}.{name}".encode()))
            with torch.no_grad():
                self.initialize(name, value)
        finally:
            torch.set_rng_state(before)
        return value

    def shard_of(self, layout):
        n, rank = layout.shard_shape.numel(), dist.get_rank(layout.group)
        own, end = range(rank * n, (rank + 1) * n), 0
        shard = torch.zeros(n, dtype=layout.parameters[0].dtype, device=self.device)
        for parameter in layout.parameters:
            begin, end = end, end + parameter.numel()
            common = range(max(begin, own.start), min(end, own.stop))
            if len(common):
                value = self.value_of(parameter).reshape(-1)[common.start - begin : common.stop - begin]
                shard[common.start - own.start : common.stop - own.start] = value
                del value
        return shard
