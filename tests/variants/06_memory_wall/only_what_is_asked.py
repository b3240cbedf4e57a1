"""Implements only the required parts, with one object per master, needs_input_grad, and choices as bit masks."""

import torch


class _Master:
    def __init__(self, parameter, optimizer):
        self.parameter, self.optimizer = parameter, optimizer
        self.weight = optimizer.param_groups[0]["params"][0]

    def step(self, settings):
        if self.parameter.grad is None:
            return
        for key in settings.keys() - {"params"}:
            self.optimizer.param_groups[0][key] = settings[key]
        self.weight.grad = self.parameter.grad.detach().to(torch.float32)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.parameter.detach().copy_(self.weight.detach())


class HoldsMasters(torch.optim.Optimizer):
    """Builds a new optimizer for every update, and gives it the state of the last one."""

    def __init__(self, params, optimizer_cls, **defaults):
        self.build = lambda weight, **settings: optimizer_cls([{"params": [weight], **settings}], **defaults)
        super().__init__(params, self.build(torch.zeros(2, 2)).defaults)

    def step_one(self, parameter, group):
        kept = self.state[parameter]
        master = kept.pop("master", None)
        if master is None:
            master = torch.empty_like(parameter, dtype=torch.float32).copy_(parameter.detach())
        weight = torch.nn.Parameter(master)
        weight.grad = parameter.grad.detach().to(torch.float32)
        settings = {key: value for key, value in group.items() if key != "params"}
        inner = self.build(weight, **settings)
        inner.state[weight] = kept
        inner.step()
        parameter.detach().copy_(master)
        self.state[parameter] = {**inner.state[weight], "master": master}


class MasterWeights(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **defaults):
        self.masters = []
        self.build = lambda weight, **settings: optimizer_cls([{"params": [weight], **settings}], **defaults)
        super().__init__(params, self.build(torch.zeros(2, 2)).defaults)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        settings = {key: value for key, value in added.items() if key != "params"}
        for parameter in added["params"]:
            weight = torch.nn.Parameter(torch.clone(parameter.detach()).float().clone())
            self.masters.append((_Master(parameter, self.build(weight, **settings)), parameter))

    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        group_of = {id(parameter): group for group in self.param_groups for parameter in group["params"]}
        for master, parameter in self.masters:
            if id(parameter) in group_of:
                master.step(group_of[id(parameter)])
        return loss

    def state_dict(self):
        inner = [(master.weight.detach(), master.optimizer.state_dict()) for master, _ in self.masters]
        return {"outer": super().state_dict(), "inner": inner}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["outer"])
        for (master, _), (weight, inner) in zip(self.masters, state_dict["inner"], strict=True):
            master.weight.data.copy_(weight)
            master.optimizer.load_state_dict(inner)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, *tensors):
        ctx.run = run
        ctx.save_for_backward(*tensors)
        ctx.cpu = torch.get_rng_state()
        ctx.gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return run(*tensors)

    @staticmethod
    def backward(ctx, gradient):
        needed = ctx.needs_input_grad[1:]
        cut = [tensor.detach() for tensor in ctx.saved_tensors]
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(ctx.cpu)
            if ctx.gpu is not None:
                torch.cuda.set_rng_state(ctx.gpu)
            for tensor, need in zip(cut, needed, strict=True):
                tensor.requires_grad_(need)
            output = ctx.run(*cut)
        wanted = [tensor for tensor, need in zip(cut, needed, strict=True) if need]
        found = list(torch.autograd.grad([output], wanted, [gradient], allow_unused=True))
        return None, *[found.pop(0) if need else None for need in needed]


class Checkpointed(torch.nn.Module):
    """Runs the module on detached parameters as well."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        kind, count = inputs[0].device.type, len(inputs)
        autocast = torch.autocast(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )
        names, parameters = zip(*self.module.named_parameters(), strict=True) if self._trains() else ((), ())

        def run(*tensors):
            weights = dict(zip(names, tensors[count:], strict=True))
            with autocast:
                return torch.func.functional_call(self.module, weights, tensors[:count])

        return _Again.apply(run, *inputs, *parameters)

    def _trains(self):
        return any(True for _ in self.module.parameters())


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    blocks, lowest, answer = len(saved_bytes), None, None
    for mask in range(2**blocks):
        held = peak = 0
        for block in range(blocks):
            chosen = mask >> block & 1
            held += input_bytes[block] if chosen else saved_bytes[block]
            peak = max(peak, held + chosen * saved_bytes[block])
        lowest = peak if lowest is None else min(lowest, peak)
        if peak <= target_bytes and (answer is None or mask.bit_count() < answer.bit_count()):
            answer = mask
    if answer is None:
        raise ValueError(f"at best {lowest:_} bytes, more than the {target_bytes:_} wanted")
    return {block for block in range(blocks) if answer >> block & 1}
