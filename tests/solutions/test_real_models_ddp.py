"""Models and habits that people really train with: the wrappers train as one process does, or raise on every rank.

Each case runs on the ranks. It returns None if everything was right, or says what was not. A case that must raise names
the words that the error has to contain.
"""

import contextlib
import copy
import warnings
from collections import OrderedDict
from functools import partial, wraps

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.prune import l1_unstructured
from torch.utils.checkpoint import checkpoint

from shared import ranks
from solutions import overlapped_flat
from solutions.bucketed_ddp import BucketedDDP
from solutions.compression import Int8, PowerSGD, TopK
from solutions.manual_ddp import ManualDDP, broadcast_state
from solutions.overlapped_ddp import OverlappedDDP
from solutions.zero1 import ZeRO1
from solutions.zero2 import ZeRO2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chapter("manual_ddp", "gradient_bucketing", "overlap", "zero1", "zero2", "less_communication"),
]

ADAMW = {"lr": 0.05, "weight_decay": 0.1}


def manual(module, optimizer_cls, **settings):
    return ManualDDP(module), optimizer_cls(module.parameters(), **settings)


def bucketed(module, optimizer_cls, **settings):
    return BucketedDDP(module, bucket_cap_mb=1e-4), optimizer_cls(module.parameters(), **settings)


def overlapped(module, optimizer_cls, **settings):
    return OverlappedDDP(module, bucket_cap_mb=1e-4), optimizer_cls(module.parameters(), **settings)


def zero1(module, optimizer_cls, **settings):
    broadcast_state(module)
    return module, ZeRO1(module.parameters(), optimizer_cls, **settings)


def zero2(module, optimizer_cls, **settings):
    model = ZeRO2(module, optimizer_cls, bucket_cap_mb=1e-4, **settings)
    return model, model


def zero1_with_module(module, optimizer_cls, **settings):
    overlapped_flat.LEAST_CAP_MB = 1e-4
    overlapped_flat.LEAST_IN_FLIGHT_MB = 0.0
    return module, ZeRO1(module.parameters(), optimizer_cls, module=module, **settings)


REPLICATED = {"manual": manual, "bucketed": bucketed, "overlapped": overlapped}
SHARDED = {"zero1": zero1, "zero2": zero2}
WRAPPERS = REPLICATED | SHARDED
ZERO1_WITH_MODULE = {"zero1 with its module": zero1_with_module}
TRAINED = WRAPPERS | ZERO1_WITH_MODULE
AT_FINISH = {"manual": manual, "bucketed": bucketed}
SELF_SYNCHRONIZING = {"overlapped": overlapped, "zero2": zero2}  # at the end of backward()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Experts(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()
        self.spare = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.use: tuple = (0,)

    def forward(self, rows):
        return sum(self.experts[index](rows) for index in self.use)


def batch(step=0, width=4):
    return torch.randn(8, width, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def own(rows):
    return rows[dist.get_rank() :: dist.get_world_size()]


def step(model, optimizer, rows, before_step=lambda: None, after_forward=lambda: None, finishes=True):
    optimizer.zero_grad()
    loss = model(rows).square().mean()
    after_forward()
    loss.backward()
    if finishes:
        finish(model)
    before_step()
    optimizer.step()


def differs_from_one_process(wrap, build, train, optimizer_cls=torch.optim.AdamW, settings=ADAMW, tolerance=1e-9):
    """Train on the ranks and in one process. Returns what differs, or None."""
    alone = build(0)
    train(alone, alone, optimizer_cls(alone.parameters(), **settings), lambda rows: rows)
    module = build(dist.get_rank())
    model, optimizer = wrap(module, optimizer_cls, **settings)
    train(model, module, optimizer, own)
    for name, value in alone.state_dict().items():
        if not torch.allclose(module.state_dict()[name], value, atol=tolerance):
            return f"{name} differs by {(module.state_dict()[name] - value).abs().max():.4f}"
    return None


def training(build=net, *how, **more):
    """Make a case of a function that trains, with more arguments at the end: it must train as one process does."""

    def decorate(train):
        @wraps(train)
        def case(wrap, *args):
            return differs_from_one_process(wrap, build, lambda *given: train(*given, *args), *how, **more)

        return case

    return decorate


# 1: what a tensor can look like


class Shaped(nn.Module):
    """A layer beside one parameter or buffer that looks unusual in memory."""

    def __init__(self, seed, tensor, kind):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(4, 2).double()
        value = tensor()
        if kind == "buffer":
            self.register_buffer("unusual", value)
        else:
            self.unusual = nn.Parameter(value, requires_grad=kind == "trained")


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


LOOKS = {
    "slice": lambda: draw(4, 8)[:, :3],
    "every second": lambda: draw(6, 8)[:, ::2],
    "transposed": lambda: draw(3, 5).t(),
    "permuted": lambda: draw(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: draw(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "diagonal": lambda: draw(5, 5).diagonal(),
    "empty": lambda: draw(0, 3),
    "scalar": lambda: draw(1)[0],
    "complex": lambda: torch.randn(3, 2, dtype=torch.complex128),
    "conjugated": lambda: torch.randn(3, 2, dtype=torch.complex128).conj(),
    "negative view": lambda: torch.randn(3, 2, dtype=torch.complex128).conj().imag,
    "real part": lambda: torch.view_as_real(torch.randn(3, 2, dtype=torch.complex128))[..., 0],
    "empty and strided": lambda: draw(4, 0, 6)[:, :, ::2],
    "bfloat16": lambda: draw(3, 3).bfloat16(),
}
BUFFERS = {
    "expanded": lambda: draw(1, 3).expand(4, 3),
    "expanded twice": lambda: draw(1, 1, 2).expand(3, 4, 2),
    "float8": lambda: torch.randn(3).to(torch.float8_e4m3fn),
    "int16": lambda: torch.randint(0, 99, (3, 2), dtype=torch.int16),
    "uint32 scalar": lambda: torch.randint(0, 99, ()).to(torch.uint32),
    "bool slice": lambda: torch.rand(4, 6) > 0.5,
    "windows": lambda: draw(9).unfold(0, 4, 1),
    "windows in two dimensions": lambda: draw(5, 4).unfold(0, 3, 1).transpose(0, 2),
    "overlapping": lambda: draw(6).as_strided((3, 3), (1, 1)),
    "expanded, empty": lambda: draw(1, 0).expand(4, 0),
    "complex half": lambda: torch.randn(3, dtype=torch.complex64).to(torch.complex32),
    "uint64 slice": lambda: torch.randint(0, 99, (4, 4)).to(torch.uint64)[:, 1:3],
}


def unusual_tensors_start_equal(_):
    wrong = []
    for wrap_name, wrap in WRAPPERS.items():
        cases = [(kind, name, look) for kind in ("trained", "frozen", "buffer") for name, look in LOOKS.items()]
        for kind, name, look in [*cases, *(("buffer", name, look) for name, look in BUFFERS.items())]:
            module = Shaped(dist.get_rank(), look, kind)
            wrap(module, torch.optim.SGD, lr=0.1)
            expected = Shaped(0, look, kind).unusual
            found, expected = (t.detach().contiguous().resolve_conj() for t in (module.unusual, expected))
            if found.dtype is torch.float8_e4m3fn:
                found, expected = found.float(), expected.float()
            if found.dtype is torch.complex32:
                found, expected = torch.view_as_real(found), torch.view_as_real(expected)
            if not torch.equal(found, expected):
                wrong.append(f"{wrap_name}: {name} as {kind}")
    return ", ".join(wrong) or None


class UsesUnusual(Shaped):
    def forward(self, rows):
        used = self.layer(rows) * self.unusual.abs().square().sum()
        return used if self.unusual.numel() else self.layer(rows) + self.unusual.sum()


def unusual_parameters_train(wrap):
    wrong = []
    for name, look in LOOKS.items():
        if name == "conjugated":  # torch's AdamW cannot train it
            continue

        def build(seed, look=look):
            return UsesUnusual(seed, look, "trained")

        def train(model, module, optimizer, part):
            for number in range(2):
                step(model, optimizer, part(batch(number)))

        tolerance = 0.05 if name == "bfloat16" else 1e-9
        if problem := differs_from_one_process(wrap, build, train, tolerance=tolerance):
            wrong.append(f"{name}: {problem}")
    return ", ".join(wrong) or None


def wrapping(build):
    """Make a case of a function that builds a module: it is only wrapped."""
    return lambda wrap: wrap(build(), torch.optim.SGD, lr=0.1)


def with_sparse_buffer(is_dense=False):
    return Shaped(0, lambda: torch.eye(3) if is_dense else torch.eye(3).to_sparse(), "buffer")


def trained_buffer(wrap):
    module = net()
    module.register_buffer("seen", torch.ones(3, requires_grad=True))
    wrap(module, torch.optim.SGD, lr=0.1)


def tied_by_storage(wrap):
    module = net()
    module.register_parameter("top", nn.Parameter(module[0].weight.data[:2]))
    wrap(module, torch.optim.SGD, lr=0.1)


def buffer_views_a_parameter(wrap):
    module = net()
    module.register_buffer("seen", module[0].weight.detach())
    wrap(module, torch.optim.SGD, lr=0.1)


class NormSGD(torch.optim.SGD):
    """Steps along the gradient of all parameters together, of norm 1."""

    def step(self, closure=None):
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        torch._foreach_div_(gradients, nn.utils.get_total_norm(gradients))
        super().step(closure)


def state_of_another_optimizer(wrap):
    _, optimizer = wrap(net(), torch.optim.SGD, lr=0.1, momentum=0.9)
    getattr(optimizer, "optimizer", optimizer).load_state_dict(torch.optim.Adam(net().parameters()).state_dict())


def on_meta(wrap):
    with torch.device("meta"):
        module = net()
    wrap(module, torch.optim.SGD, lr=0.1)


def sparse_gradient(wrap):
    module = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1))
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1)
    model(torch.tensor([1, 2])).sum().backward()
    getattr(model, "finish_gradient_sync", optimizer.step)()


def sparse_gradient_on_one_rank(wrap):
    module = nn.ModuleDict({"words": nn.Embedding(6, 4, sparse=True), "out": nn.Linear(4, 1)})
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1)
    used = module["words"](torch.tensor([1, 2])) if dist.get_rank() == 0 else torch.ones(2, 4)
    module["out"](used).sum().backward()
    getattr(model, "finish_gradient_sync", optimizer.step)()


def complex_and_compressed(wrap):
    OverlappedDDP(nn.Linear(4, 4, dtype=torch.complex64), compressor=wrap)


# 2: what changes after wrapping


def rebind(module):
    module[0].weight.data = module[0].weight.data.clamp(-0.3, 0.3)


def rebind_scaled(module):
    module[2].weight.data = 0.5 * module[2].weight.data


def initialize(module):
    torch.manual_seed(5)
    module.apply(lambda layer: layer.reset_parameters() if hasattr(layer, "reset_parameters") else None)


def average_in_place(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.lerp_(torch.ones_like(parameter), 0.1)


CHANGES = {
    "freeze": lambda m: m[0].requires_grad_(False),
    "unfreeze": lambda m: m[2].bias.requires_grad_(True),
    "to float": lambda m: m.float(),
    "assign": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
    "add a layer": lambda m: m.append(nn.Linear(3, 3).double()),
    "replace a layer": lambda m: m.__setitem__(2, nn.Linear(6, 3).double()),
    "drop a layer": lambda m: m.__delitem__(2),
    "add a weight norm": lambda m: parametrizations.weight_norm(m[0]),
    "untie": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    "tie": lambda m: m[1].register_parameter("shift", m[0].bias),
    "prune": lambda m: l1_unstructured(m[0], "weight", 0.5),
}
REBINDING = {"rebind": rebind, "rebind scaled": rebind_scaled}
HARMLESS = {
    "double": lambda m: m.double(),  # it is in float64 already
    "load": lambda m: m.load_state_dict({name: 0.9 * value for name, value in m.state_dict().items()}),
    "initialize": initialize,
    "average in place": average_in_place,
    "rebuild a buffer": lambda m: m.register_buffer("seen", torch.zeros(2)),
}
EVERY_CHANGE = CHANGES | REBINDING | HARMLESS
NOTICED_BY_SHARDS = ("freeze", "unfreeze", "to float", *REBINDING)
WHERE = ("everywhere", "on one rank")


def changes_are_noticed(wrap, change, where):
    """Change a module after one step, on all ranks or only on the last one. Returns None if all ranks raise."""
    module = net(dist.get_rank())
    module[2].bias.requires_grad_(False)
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1)
    step(model, optimizer, own(batch()))
    if where == "everywhere" or dist.get_rank() == dist.get_world_size() - 1:
        EVERY_CHANGE[change](module)
    dtype = next(module.parameters()).dtype
    try:
        step(model, optimizer, own(batch(1)).to(dtype))
    except RuntimeError as error:
        text = str(error)
        return None if "wrap" in text and ("parameter" in text or "submodules" in text) else f"unclear: {text}"
    return "this was not noticed"


@training()
def is_harmless(model, module, optimizer, part, change):
    for number in range(3):
        step(model, optimizer, part(batch(number)))
        EVERY_CHANGE[change](module)


def frozen_differently_before_wrapping(wrap):
    module = net()
    module[0].requires_grad_(dist.get_rank() == 0)
    wrap(module, torch.optim.SGD, lr=0.1)


def another_order(wrap):
    names = ("one", "other") if dist.get_rank() == 0 else ("other", "one")
    wrap(nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names)), torch.optim.SGD, lr=0.1)


# 3: what users call around the step


def steps_twice(wrap):
    model, optimizer = wrap(net(), torch.optim.SGD, lr=0.1, momentum=0.9)
    step(model, optimizer, own(batch()))
    optimizer.step()


def clips_with_torch(wrap):
    module = net()
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1)
    step(model, optimizer, own(batch()), lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.1))


def clips_values_with_torch(wrap):
    module = net()
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1)
    step(model, optimizer, own(batch()), lambda: nn.utils.clip_grad_value_(module.parameters(), 0.1))


def clips_before_finishing(wrap):
    module = net()
    model, _ = wrap(module, torch.optim.SGD, lr=0.1)
    model(own(batch())).square().mean().backward()
    try:
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    finally:
        model.finish_gradient_sync()


def steps_before_finishing(wrap, after):
    """Forget finish_gradient_sync() in one step, after a step or a skipped batch that was right."""
    model, optimizer = wrap(net(), torch.optim.SGD, lr=0.1)
    if after == "a step":
        step(model, optimizer, own(batch()))
    elif after == "a skipped batch":
        model(own(batch())).sum().backward()
        model.finish_gradient_sync()
    optimizer.zero_grad(set_to_none=after != "a step")
    model(own(batch())).sum().backward()
    try:
        getattr(optimizer, "optimizer", optimizer).step()
    finally:
        model.finish_gradient_sync()


def steps_of_a_copy_before_finishing(wrap):
    model = copy.deepcopy(wrap(net()))
    model(own(batch())).sum().backward()
    try:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    finally:
        model.finish_gradient_sync()


def steps_of_other_models(wrap):
    """Gradients that another optimizer does not use, and those that zero_grad() drops, stop no step."""
    model, optimizer = wrap(net(), torch.optim.SGD, lr=0.1)
    other = nn.Linear(3, 1).double()
    other(model(own(batch()))).sum().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    model.finish_gradient_sync()
    optimizer.step()
    model(own(batch())).sum().backward()
    model.finish_gradient_sync()
    optimizer.zero_grad()
    optimizer.step()


def scales_with_torch(wrap):
    model, optimizer = wrap(net(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(own(batch())).square().mean()).backward()
    getattr(model, "finish_gradient_sync", lambda: None)()
    scaler.step(optimizer)


@training()
def clipping_is_right(model, module, optimizer, part):
    for number in range(2):
        step(model, optimizer, part(batch(number)), lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.1))


class Rotating(nn.Module):
    """A complex layer beside a real one."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.real = nn.Linear(4, 4).double()
        self.complex = nn.Linear(4, 2, dtype=torch.complex128)

    def forward(self, x):
        return self.complex(self.real(x) + 0j).abs()


@training(Rotating, torch.optim.SGD, {"lr": 0.1})
def clips_complex_gradients(model, module, optimizer, part):
    alone = part is not own
    clip = partial(nn.utils.clip_grad_norm_, list(module.parameters())) if alone else optimizer.clip_grad_norm_
    for number in range(3):
        step(model, optimizer, part(batch(number)), lambda: clip(0.05))


@training(net, tolerance=1e-6)
def loads_state_of_lower_precision(model, module, optimizer, part):
    """As torch's optimizers do, keep the state of a float64 parameter in float64."""
    step(model, optimizer, part(batch()))
    plain = getattr(optimizer, "optimizer", optimizer)
    state = copy.deepcopy(plain.state_dict())
    for entries in state["state"].values():
        entries |= {name: value.float() for name, value in entries.items()}
    plain.load_state_dict(state)
    step(model, optimizer, part(batch(1)))


def clipping_again_after_unwrapping(_):
    module = net()
    optimizer = ZeRO1(module.parameters(), torch.optim.SGD, lr=0.1)
    del optimizer
    model = BucketedDDP(module)
    model(own(batch())).sum().backward()
    model.finish_gradient_sync()
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def whole_tensor_optimizer(_, optimizer_cls, settings):
    ZeRO1(net().parameters(), optimizer_cls, **settings)


def group_added_to_zero2(_):
    model = ZeRO2(net(), torch.optim.SGD, lr=0.1)
    model.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def skipped_batch(wrap, set_to_none):
    """Skip the batch that uses the first expert. The next one uses only the second."""
    module = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1)
    module[0](own(batch()).float()).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    module[1](own(batch()).float()).sum().backward()
    getattr(model, "finish_gradient_sync", lambda: None)()
    if module[0].weight.grad is not None and module[0].weight.grad.any():
        return "the skipped batch came back"
    return None


@training()
def interrupted_step(model, module, optimizer, part):
    """An exception in the middle of backward, on all ranks. Finish, drop the gradients, and train on."""
    for number in range(3):
        if number == 1 and part is own:
            interrupt(model, module)
            finish(model)
        step(model, optimizer, part(batch(number)))


@training()
def kept_gradients(model, module, optimizer, part):
    """zero_grad(set_to_none=False), a scheduler, evaluation between steps, and parameters given with their names."""
    schedule = torch.optim.lr_scheduler.StepLR(getattr(optimizer, "optimizer", optimizer), 1, 0.5)
    for number in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(part(batch(number))).square().mean().backward()
        getattr(model, "finish_gradient_sync", lambda: None)()
        optimizer.step()
        schedule.step()
        module.eval()
        with torch.no_grad():
            module(batch(7))
        module.train()


def alternating_models(wrap):
    """A GAN: the generator's loss also reaches the discriminator, which is frozen meanwhile."""

    def train(wrapped, modules, optimizers, part):
        (generator, judge), (_, d), (g_optimizer, d_optimizer) = wrapped, modules, optimizers
        for number in range(3):
            fake = generator(part(batch(number))).detach()
            step(judge, d_optimizer, fake)
            d.requires_grad_(False)
            g_optimizer.zero_grad()
            d(generator(part(batch(number)))).square().mean().backward()
            d.requires_grad_(True)
            getattr(generator, "finish_gradient_sync", lambda: None)()
            g_optimizer.step()

    def pair(seed):
        return net(seed), nn.Linear(3, 1).double().requires_grad_(True)

    torch.manual_seed(0)
    alone = pair(0)
    modules = copy.deepcopy(alone)
    train(alone, alone, [torch.optim.SGD(m.parameters(), lr=0.1) for m in alone], lambda rows: rows)
    pairs = [wrap(module, torch.optim.SGD, lr=0.1) for module in modules]
    train([model for model, _ in pairs], modules, [optimizer for _, optimizer in pairs], own)
    for mine, theirs in zip(modules, alone, strict=True):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            if not torch.allclose(a, b, atol=1e-9):
                return f"differs by {(a - b).abs().max():.4f}"
    return None


def finish(model):
    getattr(model, "finish_gradient_sync", lambda: None)()


@training()
def scaled_steps(model, module, optimizer, part):
    """GradScaler skips the step in which one rank overflows, on all ranks, also with clipping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(3):
        rows = batch(number)
        rows[0] *= torch.inf if number == 1 else 1
        optimizer.zero_grad()
        scaler.scale(model(part(rows)).square().mean()).backward()
        finish(model)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def unscales_before_finishing(wrap):
    model, optimizer = wrap(net(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(own(batch())).sum()).backward()
    try:
        scaler.unscale_(optimizer)
    finally:
        model.finish_gradient_sync()


def closures(wrap, optimizer_cls, settings):
    def train(model, module, optimizer, part):
        def closure():
            optimizer.zero_grad()
            loss = model(part(batch())).square().mean()
            loss.backward()
            finish(model)
            return loss if part is not own else averaged(loss)

        for _ in range(2):
            optimizer.step(closure)

    return differs_from_one_process(wrap, net, train, optimizer_cls, settings)


def averaged(loss):
    losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss.detach())
    return sum(losses) / len(losses)


@training()
def changes_gradients_early(model, module, optimizer, part):
    """Halve gradients between backward() and finish_gradient_sync(), when buckets may be in flight."""
    for number in range(2):
        optimizer.zero_grad()
        model(part(batch(number))).square().mean().backward()
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)
        finish(model)
        optimizer.step()


def graph_from_before_the_step(wrap):
    model, optimizer = wrap(net(), torch.optim.SGD, lr=0.1)
    before = model(own(batch(1))).square().mean()
    step(model, optimizer, own(batch()))
    optimizer.zero_grad()
    before.backward()


def clips_in_two_calls(wrap):
    def clip():
        norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(module.parameters(), 0.1, norm)

    module = net()
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1)
    step(model, optimizer, own(batch()), clip)


def forgets_zero_grad(wrap):
    model, optimizer = wrap(net(), torch.optim.SGD, lr=0.1)
    for number in range(2):
        model(own(batch(number))).square().mean().backward()
        finish(model)
        optimizer.step()


@training()
def interrupted_without_finishing(model, module, optimizer, part):
    """The loop catches an exception, does not finish, and goes on."""
    for number in range(3):
        if number == 1 and part is own:
            interrupt(model, module)
        step(model, optimizer, part(batch(number)), finishes=not synchronizes_itself(model))


@training()
def interrupted_on_one_rank(model, module, optimizer, part):
    """The other ranks wait at the end of backward until this rank's next backward, or its finish or zero_grad()."""
    for number in range(3):
        if number == 1 and part is own:
            if dist.get_rank() == 0:
                interrupt(model, module)
            else:
                model(part(batch(9))).square().mean().backward()
        step(model, optimizer, part(batch(number)))


@training()
def interrupted_then_accumulated(model, module, optimizer, part):
    """After the exception, the loop continues with gradients that accumulate, and finishes."""
    for number in range(3):
        if number == 1 and part is own:
            interrupt(model, module)
        optimizer.zero_grad()
        with getattr(model, "no_sync", contextlib.nullcontext)():
            model(part(batch(number))).square().mean().backward()
        finish(model)
        optimizer.step()


def interrupted_then_zeroed(wrap):
    """zero_grad(set_to_none=False) changes gradients in flight, which come back."""
    module = net()
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1)
    interrupt(model, module)
    optimizer.zero_grad(set_to_none=False)
    model(own(batch())).square().mean().backward()


def interrupt(model, module):
    def raise_interrupt(gradient):
        raise KeyboardInterrupt

    handle = module[0].weight.register_hook(raise_interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        model(own(batch(9))).square().mean().backward()
    handle.remove()


def synchronizes_itself(model):
    return hasattr(model, "no_sync")


# Without finish_gradient_sync()


@training()
def never_finished(model, module, optimizer, part):
    for number in range(4):
        step(model, optimizer, part(batch(number)), finishes=False)


def copy_never_finished(_):
    """A copy, over a group of its own, trains as the original does."""
    model = OverlappedDDP(net(), bucket_cap_mb=1e-4, group=dist.new_group())
    twin = copy.deepcopy(model)
    for each in (model, twin, model, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        step(each, optimizer, own(batch()), finishes=False)
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)]
    return None if all(same) else "the copy differs"


@training()
def finished_now_and_then(model, module, optimizer, part):
    """Finish in some steps, twice in others."""
    for number in range(4):
        step(model, optimizer, part(batch(number)), finishes=number % 2 == 1, before_step=lambda: finish(model))


@training()
def two_backwards(model, module, optimizer, part):
    """Both outside no_sync(): the second averages again."""
    for number in range(4):
        optimizer.zero_grad(set_to_none=number < 2)
        for micro in range(2):
            model(part(batch(10 * number + micro))).square().mean().backward()
        optimizer.step()


@training(Experts)
def accumulated_for_others(model, module, optimizer, part, silent_last=False):
    """The micro-batch inside no_sync() uses an expert that the other one does not."""
    for number in range(3):
        optimizer.zero_grad()
        for is_silent in (False, True) if silent_last else (True, False):
            module.use = (0, 1) if is_silent else (0,)
            with model.no_sync() if is_silent and part is own else contextlib.nullcontext():
                model(part(batch(number))).square().mean().backward()
        if silent_last:
            finish(model)
        optimizer.step()


@training()
def uneven_batches(model, module, optimizer, part, micro_batches):
    """Rank 0 has fewer micro-batches in one step, or none. All ranks finish after each."""
    ranks_of_part = [dist.get_rank()] if part is own else range(dist.get_world_size())
    for number in range(3):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            for rank in ranks_of_part:
                if number == 1 and micro == micro_batches - 1 and rank == 0:
                    continue
                rows = batch(10 * number + micro)[rank :: dist.get_world_size()]
                (model(rows).square().mean() / (1 if part is own else dist.get_world_size())).backward()
            finish(model)
        optimizer.step()


def steps_inside_no_sync(wrap):
    model, optimizer = wrap(net(), torch.optim.SGD, lr=0.1)
    step(model, optimizer, own(batch()))
    optimizer.zero_grad()
    with model.no_sync():
        model(own(batch())).sum().backward()
    try:
        getattr(optimizer, "optimizer", optimizer).step()
    finally:
        model.finish_gradient_sync()


@training()
def accumulates(model, module, optimizer, part):
    """Three micro-batches: one inside no_sync(), if there is any, one that is finished, and the last."""
    for _ in range(2):
        optimizer.zero_grad()
        with getattr(model, "no_sync", contextlib.nullcontext)():
            model(part(batch(0))).square().mean().backward()
            finish(model)
        for number in (1, 2):
            model(part(batch(number))).square().mean().backward()
            if hasattr(model, "no_sync") or number == 2:
                finish(model)
        finish(model)
        optimizer.step()


@training()
def gradients_set_by_hand(model, module, optimizer, part):
    for number in range(2):
        optimizer.zero_grad()
        loss = model(part(batch(number))).square().mean()
        parameters = list(module.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        finish(model)
        optimizer.step()


@training()
def averaged_weights(model, module, optimizer, part):
    """Evaluate an average of the weights, as in EMA and SWA."""
    average = torch.optim.swa_utils.AveragedModel(module)
    for number in range(3):
        step(model, optimizer, part(batch(number)))
        average.update_parameters(module)
    module.load_state_dict(average.module.state_dict())


def copied_with_a_group(wrap):
    group = dist.new_group()
    model = wrap(net(), group=group)
    twin = copy.deepcopy(model)
    twin(own(batch())).square().mean().backward()
    twin.finish_gradient_sync()


def wrapped_twice(wrap):
    module = net()
    models = [wrap(module, torch.optim.SGD, lr=0.1)[0] for _ in range(2)]
    try:
        models[0](own(batch())).sum().backward()
    finally:
        for model in models:
            model.finish_gradient_sync()


def wrapped_again(wrap):
    module = net()
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1)
    module[0].requires_grad_(False)
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1)
    step(model, optimizer, own(batch()))


# 4: unused everywhere


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, ADAMW),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
}
USES = [(0,), (0, 1), (0,), (0, 1, 2), (2,)]


def unused_keeps_its_value(wrap, optimizer_cls, settings, set_to_none=True):
    def train(model, module, optimizer, part):
        for number, module.use in enumerate(USES):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(part(batch(number))).square().mean().backward()
            finish(model)
            optimizer.step()

    return differs_from_one_process(wrap, Experts, train, optimizer_cls, settings)


@training(Experts)
def unused_after_a_skipped_batch(model, module, optimizer, part, whose):
    """The skipped batch uses an expert that the next one does not."""
    for number in range(3):
        module.use = (0, 1)
        model(part(batch(number))).square().mean().backward()
        finish(model)
        if number == 1:
            (module if whose == "the model's" else optimizer).zero_grad()
            module.use = (0,)
            model(part(batch(7))).square().mean().backward()
            finish(model)
        optimizer.step()
        optimizer.zero_grad()


@training(Experts)
def unused_by_one_rank(model, module, optimizer, part):
    """Each rank uses other experts, and none uses the last."""
    for number in range(3):
        optimizer.zero_grad()
        for rank in [dist.get_rank()] if part is own else range(dist.get_world_size()):
            module.use = (0, 1) if rank == 0 else (0,)
            rows = batch(number)[rank :: dist.get_world_size()]
            (model(rows).square().mean() / (1 if part is own else dist.get_world_size())).backward()
        finish(model)
        optimizer.step()


def gradients_masked_by_zero(wrap):
    """A mask makes gradients of −0.0, which are not None: weight decay changes the parameter."""

    def build(seed):
        module = net(seed)
        module.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))
        module.scale.register_hook(lambda gradient: -0.0 * gradient.abs())
        return module

    def train(model, module, optimizer, part):
        for number in range(3):
            optimizer.zero_grad()
            (module.scale * model(part(batch(number))).square().mean()).backward()
            finish(model)
            optimizer.step()

    return differs_from_one_process(wrap, build, train)


def resumed_with_unused(wrap):
    """Save, load into a new optimizer, and train on, twice: each parameter has its own number of steps."""

    def train(model, module, optimizer, part):
        begun = module
        for number, use in enumerate(USES):
            module.use = use
            step(model, optimizer, part(batch(number)))
            if number in (1, 3):
                state = copy.deepcopy(getattr(optimizer, "optimizer", optimizer).state_dict())
                values, module = module.state_dict(), Experts(7)
                module.load_state_dict(values)
                if part is own:
                    model, optimizer = wrap(module, torch.optim.AdamW, **ADAMW)
                else:
                    model, optimizer = module, torch.optim.AdamW(module.parameters(), **ADAMW)
                getattr(optimizer, "optimizer", optimizer).load_state_dict(state)
        begun.load_state_dict(module.state_dict())

    return differs_from_one_process(wrap, Experts, train)


def saved_with_unused(wrap):
    """The state is that of a plain optimizer, also of parameters that were never used."""
    states = []

    def train(model, module, optimizer, part):
        for number, module.use in enumerate(USES[:3]):
            step(model, optimizer, part(batch(number)))
        states.append(getattr(optimizer, "optimizer", optimizer).state_dict()["state"])

    problem = differs_from_one_process(wrap, Experts, train)
    plain, sharded = states
    if plain.keys() != sharded.keys():
        return f"entries for {sorted(sharded)} instead of {sorted(plain)}"
    for index, entries in plain.items():
        for name, value in entries.items():
            if not torch.allclose(sharded[index][name], value, atol=1e-9):
                return f"{name} of {index}"
    return problem


def copied_with_unused(_):
    """A copy trains on as the original does."""
    model = ZeRO2(Experts(0), torch.optim.AdamW, bucket_cap_mb=1e-4, **ADAMW)
    for number, model.module.use in enumerate(USES[:3]):
        step(model, model, own(batch(number)))
    twin = copy.deepcopy(model)
    for each in (model, twin):
        for number, each.module.use in enumerate(USES):
            step(each, each, own(batch(number)))
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)]
    return None if all(same) else f"{same.count(False)} parameters differ"


def unused_on_one_rank_is_averaged(wrap):
    """Only rank 0 uses expert 1, in some steps with a gradient of exactly zero."""
    module = Experts(0)
    model, optimizer = wrap(module, torch.optim.AdamW, **ADAMW)
    for number in range(3):
        module.use = (0, 1) if dist.get_rank() == 0 else (0,)
        optimizer.zero_grad()
        rows = own(batch(number)) * (0.0 if number == 1 else 1.0)
        model(rows).square().mean().backward()
        model.finish_gradient_sync()
        if module.experts[1].weight.grad is None:
            return "a gradient of zeros became None"
        optimizer.step()
    weights = [torch.empty_like(module.experts[1].weight) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, module.experts[1].weight.detach())
    return None if all(torch.equal(weights[0], weight) for weight in weights) else "the ranks differ"


# 5: values that are not finite


def recovers(compressor, poison, how=""):
    settings = {"step_of_poison": 1, "dtype": torch.float32, "everywhere": False, "accumulate": False}
    settings |= RECOVERING.get(how, {})
    step_of_poison, dtype, everywhere, accumulate = settings.values()
    torch.manual_seed(0)
    model = OverlappedDDP(nn.Linear(64, 64, dtype=dtype), bucket_cap_mb=0.001, compressor=compressor())
    for number in range(4):
        rows = torch.randn(4, 64).to(dtype)
        if number == step_of_poison and (everywhere or dist.get_rank() == 0):
            rows = POISONS[poison](rows)
        model.zero_grad()
        with model.no_sync() if accumulate else contextlib.nullcontext():
            model(rows).square().mean().backward()
        if accumulate:
            model(torch.randn(4, 64).to(dtype)).square().mean().backward()
        model.finish_gradient_sync()
        gradient = model.module.weight.grad.contiguous()
        finite = gradient.isfinite().all().item()
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, (finite, gradient.nan_to_num(7, 8, 9)))
        if not all(torch.equal(found[0][1], other) for _, other in found):
            return f"step {number}: the ranks have different gradients"
        if number == step_of_poison and finite:
            return "nobody sees that this step overflowed"
        if number > step_of_poison and not finite:
            return f"step {number} is still poisoned"
    return None


def fill(value, *index):
    def poison(rows):
        rows[index] = value
        return rows

    return poison


POISONS = {
    "inf": fill(float("inf"), 0, 0),
    "-inf": fill(float("-inf"), 1),
    "nan": fill(float("nan"), 0, 3),
    "all nan": fill(float("nan"), ...),
    "overflow": lambda rows: 1e30 * rows,
    "inf and nan": lambda rows: fill(float("nan"), 1, 1)(fill(float("inf"), 0, 0)(rows)),
}
COMPRESSORS = {"none": lambda: None, "int8": Int8, "topk": lambda: TopK(0.05), "powersgd": lambda: PowerSGD(2)}


RECOVERING = {
    "the first step": {"step_of_poison": 0},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
    "everywhere": {"everywhere": True},
    "in no_sync()": {"accumulate": True},
}


@training()
def skips_what_is_not_finite(model, module, optimizer, part):
    """Skip the step if the norm is not finite, as on one process."""
    for number in range(4):
        rows = batch(number)
        rows[0] *= torch.nan if number == 1 else 1
        optimizer.zero_grad()
        model(part(rows)).square().mean().backward()
        finish(model)
        clips = getattr(optimizer, "clip_grad_norm_", lambda most: nn.utils.clip_grad_norm_(module.parameters(), most))
        if clips(0.5).isfinite():
            optimizer.step()


def a_step_without_backward(compressor):
    """Finish a step in which no rank has a gradient, after one in which all have."""
    model = OverlappedDDP(net(), compressor=compressor())
    for number in range(3):
        model.zero_grad()
        if number != 1:
            model(own(batch())).square().mean().backward()
        model.finish_gradient_sync()


def empty_bucket(compressor):
    """A bucket without elements, in a dtype of its own."""
    module = net()
    module.register_parameter("none", nn.Parameter(torch.empty(0, 3, dtype=torch.float32)))
    model = OverlappedDDP(module, compressor=compressor())
    model(own(batch())).square().mean().backward()
    model.finish_gradient_sync()


def nan_everywhere_is_no_problem_of_another_rank(wrap):
    """A real NaN is passed on, and raises nothing."""
    model, optimizer = wrap(net(), torch.optim.SGD, lr=0.1)
    step(model, optimizer, own(batch()) * float("nan"))


# 9: advice


class Segments(nn.Module):
    """Checkpointed segments, each of which runs a backward of its own. The first layers are in the last one."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5)).double()

    def forward(self, rows):
        rows = rows.clone().requires_grad_()
        for segment in (self.layers[:2], self.layers[2:3], self.layers[3:4]):
            rows = checkpoint(nn.Sequential(*segment), rows, use_reentrant=True)
        return self.layers[4](rows)


@training(Segments)
def reentrant_segments(model, module, optimizer, part):
    for number in range(3):
        step(model, optimizer, part(batch(number)), finishes=False)


class Reentrant(nn.Module):
    def __init__(self, plain_call=False):
        super().__init__()
        self.into, self.layer, self.plain_call = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), plain_call

    def forward(self, rows):
        rows = checkpoint(self.layer, self.into(rows), use_reentrant=True)
        return self.layer(rows) if self.plain_call else checkpoint(self.layer, rows, use_reentrant=True)


def reentrant(wrap, plain_call):
    model, optimizer = wrap(Reentrant(plain_call), torch.optim.SGD, lr=0.1)
    step(model, optimizer, own(batch()))


def create_graph(wrap):
    model, _ = wrap(net(), torch.optim.SGD, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(own(batch())).square().sum().backward(create_graph=True)
    model.finish_gradient_sync()


def on_one_rank_only(_):
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        ManualDDP(net(), group)
        raise ValueError("the group has only rank 0")
    ManualDDP(net(), group)


def without(*names):
    return {name: wrap for name, wrap in WRAPPERS.items() if name not in names}


NONE = {"": None}
ZERO2 = {"zero2": zero2}
WITH_BUCKETS = {"bucketed": bucketed, **SELF_SYNCHRONIZING}
CLASSES_AT_FINISH = {each.__name__: each for each in (ManualDDP, BucketedDDP)}
CLASSES = {each.__name__: each for each in (ManualDDP, BucketedDDP, OverlappedDDP)}
# The number of a section, a case, the wrappers that it tries, and more arguments.
RIGHT = [
    (1, unusual_tensors_start_equal, NONE),
    (1, unusual_parameters_train, WRAPPERS),
    *((2, changes_are_noticed, REPLICATED, change, where) for change in CHANGES for where in WHERE),
    *((2, changes_are_noticed, SHARDED, change, where) for change in NOTICED_BY_SHARDS for where in WHERE),
    *((2, changes_are_noticed, ZERO2, change, "everywhere") for change in CHANGES if change not in NOTICED_BY_SHARDS),
    *((2, is_harmless, WRAPPERS, change) for change in HARMLESS),
    *((2, is_harmless, REPLICATED, change) for change in REBINDING),
    (3, scaled_steps, REPLICATED),
    (3, closures, without("zero2") | ZERO1_WITH_MODULE, torch.optim.AdamW, ADAMW),
    (3, closures, REPLICATED, torch.optim.LBFGS, {"max_iter": 3}),
    (3, changes_gradients_early, without("zero2")),
    (3, never_finished, SELF_SYNCHRONIZING),
    (3, finished_now_and_then, SELF_SYNCHRONIZING),
    (3, accumulated_for_others, SELF_SYNCHRONIZING, False),
    (3, accumulated_for_others, SELF_SYNCHRONIZING, True),
    (3, two_backwards, SELF_SYNCHRONIZING),
    (3, interrupted_on_one_rank, SELF_SYNCHRONIZING),
    (3, interrupted_then_accumulated, SELF_SYNCHRONIZING),
    (3, reentrant_segments, SELF_SYNCHRONIZING),
    (3, uneven_batches, SELF_SYNCHRONIZING, 1),
    (3, uneven_batches, SELF_SYNCHRONIZING, 2),
    (3, copy_never_finished, NONE),
    (3, interrupted_without_finishing, WRAPPERS),
    (3, accumulates, WRAPPERS),
    (3, gradients_set_by_hand, WRAPPERS),
    (3, averaged_weights, TRAINED),
    (3, clipping_is_right, REPLICATED),
    (3, clipping_again_after_unwrapping, NONE),
    (3, clips_complex_gradients, SHARDED | ZERO1_WITH_MODULE),
    (3, loads_state_of_lower_precision, SHARDED),
    (3, steps_of_other_models, REPLICATED),
    (3, interrupted_step, WRAPPERS),
    (3, kept_gradients, TRAINED),
    (3, alternating_models, REPLICATED),
    (3, wrapped_again, WRAPPERS),
    (3, skipped_batch, without("bucketed"), True),
    (3, skipped_batch, {"bucketed": bucketed, "overlapped": overlapped}, False),
    (3, copied_with_a_group, CLASSES),
    *((4, unused_keeps_its_value, SHARDED, *how) for how in OPTIMIZERS.values()),
    (4, unused_keeps_its_value, REPLICATED | ZERO1_WITH_MODULE, *OPTIMIZERS["AdamW"]),
    (4, unused_keeps_its_value, WRAPPERS, *OPTIMIZERS["AdamW"], False),
    (4, unused_after_a_skipped_batch, TRAINED, "the optimizer's"),
    (4, unused_after_a_skipped_batch, without("zero2"), "the model's"),
    (4, unused_by_one_rank, TRAINED),
    (4, gradients_masked_by_zero, TRAINED),
    (4, resumed_with_unused, SHARDED),
    (4, saved_with_unused, SHARDED),
    (4, copied_with_unused, NONE),
    (4, unused_on_one_rank_is_averaged, REPLICATED),
    (5, nan_everywhere_is_no_problem_of_another_rank, WRAPPERS),
    (5, skips_what_is_not_finite, TRAINED),
    (5, a_step_without_backward, COMPRESSORS),
    (5, empty_bucket, COMPRESSORS),
    *((5, recovers, COMPRESSORS, poison) for poison in POISONS),
    *((5, recovers, COMPRESSORS, "inf and nan", how) for how in RECOVERING),
]
# The same, with the words that the error must contain after the section.
RAISES = [
    (1, "is an expanded tensor", wrapping(lambda: Shaped(0, lambda: draw(1).expand(5), "trained")), WRAPPERS),
    (1, "'unusual' is torch.sparse", wrapping(with_sparse_buffer), REPLICATED | ZERO1_WITH_MODULE),
    (1, "models differ", wrapping(lambda: with_sparse_buffer(dist.get_rank())), REPLICATED),
    (1, "'seen' has a gradient", trained_buffer, without("zero1")),
    (1, "run one forward", wrapping(lambda: nn.Sequential(nn.LazyLinear(3))), REPLICATED | ZERO1_WITH_MODULE),
    (1, "share memory", tied_by_storage, SHARDED),
    (1, "'seen' share memory", buffer_views_a_parameter, ZERO2 | ZERO1_WITH_MODULE),
    (1, "'0.weight' is on the meta device", on_meta, REPLICATED),
    (1, "wrap its .module", wrapping(lambda: nn.Sequential(nn.parallel.DistributedDataParallel(net()))), REPLICATED),
    (1, "complex", complex_and_compressed, {"PowerSGD": PowerSGD(1)}),
    (2, "group", on_one_rank_only, NONE),
    (2, "models differ", frozen_differently_before_wrapping, WRAPPERS),
    (2, "models differ", wrapping(lambda: nn.Linear(4, 3 + dist.get_rank())), REPLICATED),
    (2, "in the same order", another_order, without("zero1")),
    (3, "this step() would use them again", steps_twice, ZERO2),
    (3, "clip_grad_norm_(max_norm)", clips_with_torch, SHARDED),
    (3, "this optimizer's clip_grad_norm_", clips_with_torch, ZERO1_WITH_MODULE),
    (3, "clip_grad_norm_(max_norm)", clips_values_with_torch, {"zero1": zero1}),
    (3, "clip_grad_norm_(max_norm)", clips_in_two_calls, SHARDED),
    (3, "finish_gradient_sync() before it", clips_before_finishing, AT_FINISH),
    (3, "between backward() and step()", steps_before_finishing, AT_FINISH, "nothing"),
    (3, "between backward() and step()", steps_before_finishing, AT_FINISH, "a step"),
    (3, "between backward() and step()", steps_before_finishing, AT_FINISH, "a skipped batch"),
    (3, "between backward() and step()", steps_of_a_copy_before_finishing, CLASSES_AT_FINISH),
    (3, "GradScaler", scales_with_torch, SHARDED),
    (3, "train in bfloat16", scales_with_torch, ZERO1_WITH_MODULE),
    (3, "and unscale_()", unscales_before_finishing, AT_FINISH),
    (3, "outside no_sync()", steps_inside_no_sync, SELF_SYNCHRONIZING),
    (3, "before you change gradients", interrupted_then_zeroed, {"overlapped": overlapped}),
    (3, "inplace operation", graph_from_before_the_step, WRAPPERS),
    (3, "zero_grad()", forgets_zero_grad, SHARDED),
    (3, "Call its zero_grad() after each step()", forgets_zero_grad, ZERO1_WITH_MODULE),
    (3, "Adafactor does not", whole_tensor_optimizer, NONE, torch.optim.Adafactor, {"lr": 0.1}),
    (3, "LBFGS cannot", whole_tensor_optimizer, NONE, torch.optim.LBFGS, {}),
    (3, "NormSGD does not", whole_tensor_optimizer, NONE, NormSGD, {"lr": 0.1}),
    (3, "lacks dampening", state_of_another_optimizer, SHARDED),
    (3, "two wrappers", wrapped_twice, {"overlapped": overlapped}),
    (3, "before you wrap", group_added_to_zero2, NONE),
    (9, "'0.weight' has a sparse gradient", sparse_gradient, WITH_BUCKETS),
    (9, "sparse", sparse_gradient_on_one_rank, {"overlapped": overlapped, "bucketed": bucketed}),
    (9, "use_reentrant=False", reentrant, SELF_SYNCHRONIZING, False),
    (9, "use_reentrant=False", reentrant, SELF_SYNCHRONIZING, True),
    (9, "create_graph", create_graph, WITH_BUCKETS),
]
KINDS = (1, 2, 3, 4, 5, 9)


def run_cases(kind: int) -> dict[str, str]:
    """Run all cases of a kind. Returns what went wrong, by case."""
    torch.set_num_threads(1)
    wrong = {}
    of_kind = [("", *row[1:]) for row in RIGHT if row[0] == kind] + [row[1:] for row in RAISES if row[0] == kind]
    for words, case, wrappers, *args in of_kind:
        for name, wrap in wrappers.items():
            try:
                problem = case(wrap, *args) or (words and "raised nothing")
            except Exception as error:  # what it is does not matter: it goes into the report
                problem = "" if words and words in str(error) else f"{type(error).__name__}: {error}"
            if problem:
                wrong[f"{case.__name__}, {words}, {name}, {args}"] = problem
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_real_models(kind, four_ranks):
    with ranks.world(2):
        found = ranks.run(run_cases, kind)
    assert found == [{}, {}]
