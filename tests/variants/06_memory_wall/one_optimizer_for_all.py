"""Keeps all masters in one optimizer, with one gradient at a time, and checkpoints with saved_tensors_hooks."""

import torch
from torch import nn


def model_state_bytes(module, optimizer):
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for parameter in module.parameters():
        found["parameters"] += parameter.numel() * parameter.element_size()
        if parameter.grad is not None:
            found["gradients"] += parameter.grad.numel() * parameter.grad.element_size()
    for kept in optimizer.state.values():
        for value in filter(torch.is_tensor, kept.values()):
            found["optimizer"] += value.numel() * value.element_size()
    return found


class MasterWeights(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **defaults):
        self.whole = optimizer_cls([torch.zeros(1)], **defaults)
        self.whole.param_groups.clear()
        self.inner_group_of, self.ready = {}, False
        super().__init__(params, self.whole.defaults)
        self.ready = True
        self._follow()

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        if self.ready:
            self._follow()

    def _follow(self):
        for group in self.param_groups:
            if any("master" in self.state[parameter] for parameter in group["params"]):
                continue
            for parameter in group["params"]:
                self.state[parameter]["master"] = torch.empty_like(parameter, dtype=torch.float32).copy_(
                    parameter.detach()
                )
            self.whole.add_param_group({**group, "params": [self.state[p]["master"] for p in group["params"]]})
            self.inner_group_of |= dict.fromkeys(group["params"], self.whole.param_groups[-1])

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            inner = self.inner_group_of[group["params"][0]]
            inner.update((key, value) for key, value in group.items() if key != "params")
        for parameter in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            master = self.state[parameter]["master"]
            master.grad = parameter.grad.to(torch.float32)
            self.whole.step()
            master.grad = None
            parameter.data.copy_(master)
        return loss

    def _masters(self):
        return [self.state[parameter]["master"] for group in self.param_groups for parameter in group["params"]]

    def state_dict(self):
        settings = {**super().state_dict(), "state": {}}
        return {"settings": settings, "masters": self._masters(), "whole": self.whole.state_dict()}

    def load_state_dict(self, state_dict):
        masters = self._masters()
        super().load_state_dict(state_dict["settings"])
        self.whole.load_state_dict(state_dict["whole"])
        self.state.clear()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, master, value in zip(parameters, masters, state_dict["masters"], strict=True):
            self.state[parameter]["master"] = master.copy_(value)
        inner = [group for group in self.whole.param_groups for _ in group["params"]]
        self.inner_group_of = dict(zip(parameters, inner, strict=True))


class _Packed:
    """Saves an index for each activation, and recomputes all activations when the first one is needed."""

    def __init__(self, module, inputs):
        self.module, self.inputs, self.count, self.found = module, inputs, 0, {}
        self.used = *inputs, *module.parameters()
        self.versions = [each._version for each in self.used]
        kind = inputs[0].device.type
        now = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self.autocast = torch.autocast(kind, *now, cache_enabled=False)
        self.random = torch.get_rng_state(), self._gpu()

    @staticmethod
    def _gpu():
        return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def pack(self, _):
        self.count += 1
        return self.count

    def unpack(self, index):
        if not self.found:
            self._again()
        return self.found.pop(index)

    def _again(self):
        if self.versions != [each._version for each in self.used]:
            raise RuntimeError("somebody wrote into an input or a parameter since forward")
        now = torch.get_rng_state(), self._gpu()
        self._set(self.random)
        indices = iter(range(1, self.count + 1))

        def keep(tensor):
            self.found[next(indices)] = tensor.detach()

        with torch.enable_grad(), self.autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda _: None):
            self.module(*self.inputs)
        self._set(now)

    @staticmethod
    def _set(random):
        torch.set_rng_state(random[0])
        if random[1] is not None:
            torch.cuda.set_rng_state_all(random[1])


class Checkpointed(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        cut = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
        packed = _Packed(self.module, cut)
        with torch.autograd.graph.saved_tensors_hooks(packed.pack, packed.unpack):
            return self.module(*inputs)


def activation_peak_bytes(saved_bytes, input_bytes, chosen):
    below, moments = 0, []
    for index in range(len(saved_bytes)):
        if index in chosen:
            moments.append(below + input_bytes[index] + saved_bytes[index])
            below += input_bytes[index]
        else:
            below += saved_bytes[index]
            moments.append(below)
    return max(moments)


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    """Go through the blocks and extend every choice so far by both options: keep or checkpoint the block."""
    best = {frozenset(): (0, 0)}  # maps each choice to (bytes kept so far, peak)
    for index, (saved, given) in enumerate(zip(saved_bytes, input_bytes, strict=True)):
        best = {
            **{chosen: (held + saved, max(peak, held + saved)) for chosen, (held, peak) in best.items()},
            **{
                chosen | {index}: (held + given, max(peak, held + given + saved))
                for chosen, (held, peak) in best.items()
            },
        }
    good = [chosen for chosen, (_, peak) in best.items() if peak <= target_bytes]
    if not good:
        raise ValueError(f"the lowest peak is {min(peak for _, peak in best.values())} bytes")
    return sorted(min(good, key=len))
