"""Models and habits from public bug reports, under ZeRO3: it trains as one process does, or says what is wrong.

The functions without `test_` run on the ranks. Each case of TRAINED is trained by ZeRO3 on two ranks and in one
process. Each case of REFUSED must raise an error on every rank, with these words in it.
"""

import copy
import dataclasses
import datetime
import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from shared import ranks
from solutions.deferred import Materializer
from solutions.manual_ddp import ManualDDP
from solutions.overlapped_ddp import OverlappedDDP
from solutions.zero1 import ZeRO1
from solutions.zero2 import ZeRO2
from solutions.zero3 import ZeRO3

pytestmark = [pytest.mark.slow, pytest.mark.chapter("zero3", "fsdp")]


def batch_of(step: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def own(batch: torch.Tensor) -> torch.Tensor:
    return batch[dist.get_rank() :: dist.get_world_size()]


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def finish(model: nn.Module) -> None:
    if isinstance(model, ZeRO3):
        model.finish_gradient_sync()


def step(model, optimizer, batch, loss_of=lambda output: output.square().mean()):
    optimizer.zero_grad()
    loss_of(model(batch)).backward()
    finish(model)
    optimizer.step()


def same(model: ZeRO3, alone: nn.Module) -> None:
    """Assert that a wrapper holds the values of a model that was trained in one process."""
    found = model.full_state_dict()
    for name, value in alone.state_dict().items():
        if torch.is_tensor(value):
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)


# -- models that are trained as in one process


class Strided(nn.Module):
    """Has a transposed and a sliced parameter, a frozen one, one without elements, and an expanded buffer."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(4, 4).t())
        self.sliced = nn.Parameter(torch.randn(4, 8)[:, ::2])
        self.frozen = nn.Parameter(torch.randn(8, 4)[::2], requires_grad=False)
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.register_buffer("ones", torch.ones(1).expand(4))
        self.register_buffer("columns", torch.randn(4, 6)[:, :4])

    def forward(self, x):
        return x @ self.transposed @ self.sliced @ self.frozen * self.ones + x @ self.columns


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    logits: torch.Tensor | None = None


class InDataclass(nn.Module):
    """Its unit returns a dataclass, an object, or a dict in a list."""

    def __init__(self, wrap):
        super().__init__()
        self.layers, self.wrap = nn.ModuleList([Wrapping(wrap), nn.Linear(4, 4)]), wrap

    def forward(self, x):
        found = self.layers[0](x)
        hidden = found[0]["hidden"] if isinstance(found, list) else found.hidden
        return self.layers[1](hidden)


class Wrapping(nn.Linear):
    def __init__(self, wrap):
        super().__init__(4, 4)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(hidden=super().forward(x))


class Int8Base(nn.Module):
    """A frozen int8 weight with a trained low-rank update, as in quantized LoRA."""

    def __init__(self):
        super().__init__()
        base = torch.randint(-127, 128, (4, 4), dtype=torch.int8)
        self.base = nn.Parameter(base, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.01), requires_grad=False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return x @ (self.base.to(x.dtype) * self.scale) + self.up(self.down(x))


class InPlace(nn.Module):
    """The unit returns a view, and the caller adds to it in place."""

    def __init__(self, view):
        super().__init__()
        self.layers, self.view = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), view
        for layer in self.layers:
            layer.forward = functools.partial(self.viewed, layer)

    def viewed(self, layer, x):
        return self.view(nn.functional.linear(x, layer.weight, layer.bias))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x.tanh())
            y += x
            x = y
        return x


class WritesInto(nn.Linear):
    """A unit that writes its result into an argument, and returns another one without a graph, or None."""

    def __init__(self, returned):
        super().__init__(4, 4)
        self.returned = returned

    def forward(self, x, out):
        out[0].copy_(super().forward(x))
        return self.returned


class Preallocates(nn.Module):
    def __init__(self, returned=None):
        super().__init__()
        self.layers = nn.ModuleList([WritesInto(returned), WritesInto(returned)])

    def forward(self, x):
        for layer in self.layers:
            out = torch.zeros(1, *x.shape, dtype=x.dtype)
            layer(x, out=out)
            x = out[0].tanh()
        return x


def with_weight_norm():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4))


def with_parametrization():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def with_own_parametrization():
    model = plain()
    parametrize.register_parametrization(model[0], "weight", Doubled())
    return model


def with_pruning():
    model = plain()
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def with_a_weights_hook():
    model = plain()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    return model


class ExtraState(nn.Linear):
    history = (1.0,)

    def get_extra_state(self):
        return {"history": self.history}

    def set_extra_state(self, state):
        self.history = state["history"]


MODELS = {
    "strided": Strided,
    "dataclass": lambda: InDataclass(Output),
    "namespace": lambda: InDataclass(SimpleNamespace),
    "dict in a list": lambda: InDataclass(lambda **found: [found]),
    "int8 base": Int8Base,
    "in place on a view": lambda: InPlace(lambda y: y.unsqueeze(0).squeeze(0)),
    "in place on a transposed view": lambda: InPlace(lambda y: y.t().t()),
    "written into an argument": Preallocates,
    "written into an argument, and a status": lambda: Preallocates(torch.ones(())),
    "old weight_norm": with_weight_norm,
    "weight_norm": with_parametrization,
    "own parametrization": with_own_parametrization,
    "pruned": with_pruning,
    "hook of a weight": with_a_weights_hook,
    "extra state": lambda: nn.Sequential(ExtraState(4, 4), nn.Linear(4, 4)),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """Build a model whose values are float64, except integers."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        return MODELS[name]()
    finally:
        torch.set_default_dtype(torch.float32)


def trained(name: str) -> None:
    alone, module = build(name), build(name)
    model = ZeRO3(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reference = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.01)
    for number in range(3):
        step(model, optimizer, own(batch_of(number)))
        step(alone, reference, batch_of(number))
    same(model, alone)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_one_process(four_ranks, name):
    with ranks.world(2):
        ranks.run(trained, name)


# -- habits: each runs one step of a training


def pair() -> tuple[tuple, tuple]:
    """Return a wrapper, its optimizer, and the part of a batch that it sees, and the same for one process."""
    torch.manual_seed(0)
    alone = plain().double()
    model = ZeRO3(copy.deepcopy(alone))
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, alone))
    return (model, ours, own), (alone, theirs, lambda batch: batch)


def skipped_batch(number, model, optimizer, part, set_to_none=True):
    optimizer.zero_grad(set_to_none=set_to_none)
    model(part(batch_of(number))).square().mean().backward()
    if number != 1:  # in step 1, the loss was no number
        finish(model)
        optimizer.step()


def an_error_in_backward(number, model, optimizer, part):
    if number == 1 and isinstance(model, ZeRO3):
        hidden = model.module[1].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(own(batch_of(1)).requires_grad_()).square().mean().backward()
        hidden.remove()
    step(model, optimizer, part(batch_of(number)))


def an_error_in_forward(number, model, optimizer, part):
    if number == 1 and isinstance(model, ZeRO3):
        hook = model.module[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(own(batch_of(1)))
        hook.remove()
    step(model, optimizer, part(batch_of(number)))


def input_gradient_first(number, model, optimizer, part):
    batch = part(batch_of(number)).clone().requires_grad_()
    optimizer.zero_grad()
    losses = model(batch).square().mean(1)
    (gradient,) = torch.autograd.grad(losses.sum(), batch, retain_graph=True)
    (losses * gradient.norm(dim=1)).mean().backward()
    finish(model)
    optimizer.step()


def evaluation_between(number, model, optimizer, part):
    loss = model(part(batch_of(number))).square().mean()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model.eval()(part(batch_of(9)))
    optimizer.zero_grad()
    loss.backward()
    finish(model)
    optimizer.step()


def zero_grad_of_the_module(number, model, optimizer, part, set_to_none):
    (model.module if isinstance(model, ZeRO3) else model).zero_grad(set_to_none)
    model(part(batch_of(number))).square().mean().backward()
    finish(model)
    optimizer.step()


def two_forwards_before_two_backwards(number, model, optimizer, part):
    optimizer.zero_grad()
    losses = [model(part(batch_of(10 * number + k))).square().mean() for k in range(2)]
    for loss in reversed(losses):
        loss.backward()
        finish(model)
    optimizer.step()


def a_step_of_two_forwards(number, model, optimizer, part):
    optimizer.zero_grad()
    (model(part(batch_of(number))) - 2 * model(part(batch_of(number + 10)))).square().mean().backward()
    finish(model)
    optimizer.step()


HABITS = {
    "zero_grad() of the module": functools.partial(zero_grad_of_the_module, set_to_none=True),
    "zero_grad() of the module, to zeros": functools.partial(zero_grad_of_the_module, set_to_none=False),
    "two forwards before two backwards": two_forwards_before_two_backwards,
    "a loss of two forwards": a_step_of_two_forwards,
    "skipped batch": skipped_batch,
    "skipped batch, gradients set to zero": functools.partial(skipped_batch, set_to_none=False),
    "an error in backward": an_error_in_backward,
    "an error in forward": an_error_in_forward,
    "an input's gradient first": input_gradient_first,
    "an evaluation between forward and backward": evaluation_between,
}


def run_habit(name: str) -> None:
    sides = pair()
    for number in range(4):
        for side in sides:
            HABITS[name](number, *side)
    same(sides[0][0], sides[1][0])


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_right(four_ranks, name):
    with ranks.world(2):
        ranks.run(run_habit, name)


# -- trainings that are more than one model and its steps


def alternately() -> None:
    torch.manual_seed(0)
    alone = [plain().double(), plain().double()]
    models = [ZeRO3(copy.deepcopy(module)) for module in alone]

    def train(generator, discriminator, part):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]
        for number in range(3):
            for index, loss_of in enumerate((lambda x: discriminator(generator(x)), lambda x: discriminator(x))):
                optimizers[index].zero_grad()
                loss_of(part(batch_of(number))).square().mean().backward()
                finish((generator, discriminator)[index])
                optimizers[index].step()

    train(*models, own)
    train(*alone, lambda batch: batch)
    for model, module in zip(models, alone, strict=True):
        same(model, module)


def grad_scaler() -> None:
    (model, *_), (alone, *_) = pair()
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", init_scale=4.0)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for number in range(3):
        batch = batch_of(number)
        if number == 1:
            batch[0, 0] = torch.inf  # of rank 0
        for one, scaler, optimizer, part in zip((model, alone), scalers, optimizers, (own(batch), batch), strict=True):
            optimizer.zero_grad()
            scaler.scale(one(part).square().mean()).backward()
            finish(one)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0
    same(model, alone)


def average_of_shards() -> None:
    sides = pair()
    averages = ZeRO3(copy.deepcopy(sides[1][0])), copy.deepcopy(sides[1][0])
    for number in range(3):
        for average, (model, optimizer, part) in zip(averages, sides, strict=True):
            step(model, optimizer, part(batch_of(number)))
            for one, other in zip(average.parameters(), model.parameters(), strict=True):
                one.detach().lerp_(other.detach(), 0.1)
    same(*averages)


def extra_state_comes_back() -> None:
    model = ZeRO3(build("extra state"))
    model.module[0].history = (1.0, 2.0)
    state = model.full_state_dict()
    other = ZeRO3(build("extra state", seed=1))
    other.load_full_state_dict(state)
    assert other.module[0].history == (1.0, 2.0)


def lstm_on_meta() -> None:
    def initialize(name, tensor):
        tensor.uniform_(-0.1, 0.1)

    with torch.device("meta"):
        module = nn.LSTM(4, 4, dtype=torch.float64)
    model = ZeRO3(module, materializer=Materializer(module, initialize, "cpu"))
    alone = nn.LSTM(4, 4, dtype=torch.float64)
    alone.load_state_dict(model.full_state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone)]
    for number in range(2):
        batch = batch_of(number).unsqueeze(0)
        step(model, optimizers[0], batch[:, dist.get_rank() :: 2], lambda output: output[0].square().mean())
        step(alone, optimizers[1], batch, lambda output: output[0].square().mean())
    same(model, alone)


TRAININGS = {
    "two models alternately": alternately,
    "GradScaler": grad_scaler,
    "an average of the shards": average_of_shards,
    "extra state": extra_state_comes_back,
    "an LSTM on the meta device": lstm_on_meta,
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_is_right(four_ranks, name):
    with ranks.world(2):
        ranks.run(TRAININGS[name])


# -- what is refused


class Cached(nn.Module):
    """Keeps the output of a unit, from which the loss is computed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def encode(self, x):
        return self.layers[0](x) @ self.layers[1].weight

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


def tied_by_storage():
    model = plain()
    model[2].weight = nn.Parameter(model[0].weight.data.view(4, 6)[:, :])
    return model


def parameter_and_buffer():
    model = plain()
    model.register_buffer("alias", model[0].weight.data[0])
    return model


def expanded():
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.ones(1, 4).expand(4, 4))
    return model


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layers = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        x = self.stem(x)
        for layer in (*self.layers, *self.layers):
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def changed(change):
    """Train one step, change the model, and train another step."""

    def train(module):
        model = ZeRO3(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, own(batch_of(0)))
        change(module)
        step(model, optimizer, own(batch_of(1)))

    return train


def clip(model, module):
    model(own(batch_of(0))).square().mean().backward()
    model.finish_gradient_sync()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def step_with(module, optimizer_cls):
    model = ZeRO3(module)
    step(model, optimizer_cls(model.parameters(), lr=0.1), own(batch_of(0)))


def penalty(model):
    x = own(batch_of(0)).requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def with_clamping(layer):
    def clamped(layer, _inputs):
        with torch.no_grad():
            layer.weight.clamp_(-0.1, 0.1)

    layer.register_forward_pre_hook(clamped)
    return layer


def ones(module):
    return {name: torch.ones(p.shape, dtype=p.dtype) for name, p in module.named_parameters()}


def in_forward(module):
    """Rebind a weight's memory while it is unsharded."""
    module[0].register_forward_pre_hook(lambda layer, _: setattr(layer.weight, "data", layer.weight.data.clone()))


def with_model(use):
    """Train one step, and use the wrapper."""

    def train(module):
        model = ZeRO3(module)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), own(batch_of(0)))
        use(model)

    return train


def backward_after_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(own(batch_of(0))).square().mean()
    step(model, optimizer, own(batch_of(1)))
    loss.backward()


def without_finishing(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(own(batch_of(0))).square().mean().backward()
    optimizer.step()


def load_rank_0(model):
    states = [model.state_dict()]
    dist.broadcast_object_list(states)
    if dist.get_rank() == 1:
        model.load_state_dict(states[0])
    else:
        raise RuntimeError("let each rank save its own")


def optimizer_before(module):
    """Build the optimizer, and then the wrapper."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step(ZeRO3(module), optimizer, own(batch_of(0)))


def without_finishing_optimizer_before(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ZeRO3(module)(own(batch_of(0))).square().mean().backward()
    optimizer.step()


class InOrder(nn.Module):
    """Calls units of one size in an order of its own."""

    def __init__(self):
        super().__init__()
        self.layers, self.order = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), (0, 1, 2)

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x)
        return x


def in_another_order(module):
    module.order = (0, 1, 2) if dist.get_rank() == 0 else (1, 0, 2)
    model = ZeRO3(module)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), own(batch_of(0)))


def adamw_state(model) -> dict:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, own(batch_of(0)))
    return optimizer.state_dict()


def state_of_other_units(model):
    """Load the state of the same model, but with its two equal units in another order."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.load_state_dict(adamw_state(ZeRO3(module, units=[module[1], module[0]])))
    step(model, optimizer, own(batch_of(0)))


def another_ranks_state(model):
    states = [adamw_state(model)]
    dist.broadcast_object_list(states)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, own(batch_of(0)))
    optimizer.load_state_dict(states[0])
    if dist.get_rank() == 0:
        raise RuntimeError("the state of shard 0 of 2, for shard 1 of 2")
    optimizer.step()


def per_sample_gradients(model):
    def loss(x):
        return model(x.unsqueeze(0)).sum()

    torch.func.vmap(torch.func.grad(loss))(own(batch_of(0)))


def with_other_values(model):
    torch.func.functional_call(model, {n: torch.zeros_like(p) for n, p in model.named_parameters()}, own(batch_of(0)))


class LongEmbedding(nn.Embedding):
    def forward(self, x):
        return super().forward(x.argmax(1))


class Doubling(nn.Parameter):
    """A parameter that does something else in some operations, as those of quantization libraries do."""


def with_a_gradient(module):
    module(batch_of(0)).sum().backward()
    ZeRO3(module)


def frozen_on_one_rank(module):
    module[0].requires_grad_(dist.get_rank() == 0)
    ZeRO3(module)


def in_place_after_forward(model):
    model(own(batch_of(0)))
    with torch.no_grad():
        model.module.weight.mul_(0.5)
    model(own(batch_of(0)))


def read(use):
    return with_model(lambda model: use(model.module[0].weight))


def frozen_first():
    model = plain()
    model[0].requires_grad_(False)
    return model


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return nn.functional.embedding(x.argmax(1), self.weight, sparse=True)


def with_weight(weight):
    layer = nn.Linear(4, 4)
    layer.weight = weight
    return layer


def with_buffer(buffer):
    layer = nn.Linear(4, 4)
    layer.register_buffer("extra", buffer)
    return layer


def single():
    return nn.Linear(4, 4)


def two_equal():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


trained_once = with_model(lambda model: None)
CHANGED = {  # what changes after a step, and the words
    "frozen": (lambda module: module[2].requires_grad_(False), "2.weight", "was frozen"),
    "one bias frozen": (lambda m: m[0].bias.requires_grad_(False), "0.bias", "was frozen"),
    "replaced": (lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(6, 4).double())), "0.weight", "replaced"),
    "assigned": (lambda m: m.load_state_dict(ones(m), assign=True), "weight", "replaced"),
    "added": (lambda module: module.append(nn.Linear(4, 4).double()), "added", "wrap it again"),
    "parameter added": (lambda m: m[0].register_parameter("gain", nn.Parameter(torch.ones(1))), "added", "'0.gain'"),
    "rebound in forward": (in_forward, "0.weight", "other memory"),
    "rebound": (lambda m: setattr(m[0].weight, "data", torch.ones(6, 4)), "0.weight", "sharded"),
    "another dtype": (lambda module: module.float(), "0.weight", "sharded"),
    "another memory format": (lambda m: m.to(memory_format=torch.channels_last), "0.", "sharded"),
    "layer replaced": (lambda m: m.__setitem__(0, nn.Linear(4, 6).double()), "0.weight", "replaced or removed"),
    "initialized again": (lambda m: nn.init.zeros_(m[0].weight), "0.weight", "load_full_state_dict"),
    "loaded": (lambda m: m.load_state_dict(plain().state_dict()), "0.weight", "load_full_state_dict"),
}
USED = {  # what uses the wrapper after a step
    "another rank's state": (another_ranks_state, "the state of shard 0 of 2", "for shard 1 of 2"),
    "torch.func": (per_sample_gradients, "torch.func's transforms", "before you wrap"),
    "functional_call": (with_other_values, "functional_call()", "load_full_state_dict()"),
    "torch.compile": (
        lambda m: torch.compile(m, backend="eager")(own(batch_of(0))),
        "torch.compile() is not supported",
        "0.weight",
    ),
    "torch's clipping of the module": (lambda m: clip(m, m.module), "clip_grad_norm_() of the ZeRO3 model"),
    "gradient": (
        lambda m: setattr(m.module[0].weight, "grad", None),
        "gradient of the parameter '0.weight'",
        "zero_grad()",
    ),
    "saved": (lambda m: torch.save(m.module.state_dict(), "/dev/null"), "0.weight", "full_state"),
    "backward after step": (backward_after_step, "weight", "run forward again"),
    "step before finishing": (without_finishing, "finish_gradient_sync"),
    "gradient penalty": (penalty, "create_graph=True"),
    "torch's clipping": (lambda m: clip(m, m), "clip_grad_norm_() of the ZeRO3 model"),
    "another rank's shards": (load_rank_0, "let each rank save"),
    "copied": (copy.deepcopy, "a ZeRO3 model cannot be copied", "load_full_state_dict"),
    "pickled": (pickle.dumps, "a ZeRO3 model cannot be copied", "load_full_state_dict"),
    "an averaged copy": (AveragedModel, "a ZeRO3 model cannot be copied", "average weights"),
}
READ = {  # what uses a weight after a step: each gets the same words
    "norm": lambda weight: weight.norm(),
    "numpy": lambda weight: weight.detach().numpy(),
    "transposed": lambda weight: weight.T.sum(),
    "data": lambda weight: weight.data.sum(),
    "multiplied": lambda weight: torch.ones(1, 6).double() @ weight,
    "list": lambda weight: weight.tolist(),
    "copied parameter": copy.deepcopy,
}
OTHERS = {  # a model, and what is done with it
    "unfrozen": (frozen_first, changed(lambda module: module[0].requires_grad_(True)), "0.weight", "unfrozen"),
    "tied later": (two_equal, changed(lambda m: setattr(m[1], "weight", m[0].weight)), "0.weight", "sharded"),
    "clamped in forward": (
        lambda: nn.Sequential(with_clamping(nn.Linear(4, 4))),
        trained_once,
        "0.weight",
        "changed in place",
    ),
    "another order of units": (InOrder, in_another_order, "layers.0.weight", "the same units in the same order"),
    "the state of other units": (
        two_equal,
        with_model(state_of_other_units),
        "the state of shard",
        "of 1.weight [4, 4]",
        "of 0.weight [4, 4]",
        "divided in the same way",
    ),
    "max_norm": (lambda: nn.Sequential(LongEmbedding(4, 4, max_norm=0.1)), trained_once, "0.weight", "max_norm"),
    "changed after forward": (single, with_model(in_place_after_forward), "weight", "changed in place"),
    "optimizer built before": (plain, optimizer_before, "SGD", "after wrapping"),
    "optimizer built before, of a root": (single, without_finishing_optimizer_before, "SGD", "after wrapping"),
    "Adafactor": (
        plain,
        lambda module: step_with(module, torch.optim.Adafactor),
        "Adafactor",
        "each element by itself",
    ),
    "a subclass of Parameter": (lambda: with_weight(Doubling(torch.ones(4, 4).double())), ZeRO3, "weight", "Doubling"),
    "a gradient from before": (plain, with_a_gradient, "0.weight", "zero_grad()"),
    "a buffer that is trained": (
        lambda: with_buffer(torch.ones(4, requires_grad=True)),
        ZeRO3,
        "the buffer 'extra'",
        "detach()",
    ),
    "frozen on one rank": (plain, frozen_on_one_rank, "0.weight", "frozen", "the ranks' models differ"),
    "another method": (Cached, with_model(lambda m: m.module.encode(own(batch_of(0)))), "weight", "full_state_dict"),
    "reentrant checkpoint": (CalledTwice, trained_once, "use_reentrant=False", "layers.0"),
    "sparse": (lambda: nn.Embedding(4, 4, sparse=True), ZeRO3, "sparse=False"),
    "functional sparse": (Sparse, trained_once, "sparse", "weight"),
    "tied by storage": (tied_by_storage, ZeRO3, "0.weight", "2.weight", "share memory"),
    "a buffer is a parameter's view": (parameter_and_buffer, ZeRO3, "alias", "0.weight", "share memory"),
    "expanded": (expanded, ZeRO3, "weight", "share memory"),
    "wrapped twice": (plain, lambda module: (ZeRO3(module), ZeRO3(module)), "0.weight", "only once"),
    "wrapped by OverlappedDDP": (
        plain,
        lambda module: (OverlappedDDP(module), ZeRO3(module)),
        "0.weight",
        "averaged by another wrapper",
    ),
    "on the meta device": (lambda: nn.Linear(4, 4, device="meta"), ZeRO3, "'weight' is on the meta", "Materializer"),
    "lazy": (lambda: nn.LazyLinear(4), ZeRO3, "weight", "uninitialized"),
    "sharded extra state": (
        lambda: nn.Sequential(ExtraState(4, 4)),
        with_model(lambda m: m.sharded_state_dict(torch.optim.SGD(m.parameters(), lr=0.1))),
        "0._extra_state",
        "full_state_dict",
    ),
}
REFUSED = {
    **{name: (plain, changed(change), *words) for name, (change, *words) in CHANGED.items()},
    **{name: (plain, with_model(use), *words) for name, (use, *words) in USED.items()},
    **{name: (plain, read(use), "0.weight", "full_state_dict") for name, use in READ.items()},
    **OTHERS,
}


def refused(name: str) -> str:
    build_module, use, *_ = REFUSED[name]
    torch.manual_seed(0)
    module = build_module()
    keep = ("tied by storage", "a buffer is a parameter's view", "expanded", "lazy", "a subclass of Parameter")
    if name not in (*keep, "a buffer that is trained"):
        module.double()
    try:
        use(module)
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        dist.barrier()
    return "nothing"


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_what_is_wrong(four_ranks, name):
    with ranks.world(2):
        for message in ranks.run(refused, name):
            for words in REFUSED[name][2:]:
                assert words in message, message


# -- at the deadline


def left_alone(name: str) -> str:
    """Run two steps, of which rank 1 skips the second. Returns what rank 0 says about it."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model, optimizer, finish = LEFT_ALONE[name][0](plain().double(), group)
    store, key = dist.distributed_c10d._get_default_store(), f"rank 0 was left alone by {name}"
    for number in range(2):
        if number == 1 and dist.get_rank() == 1:
            store.get(key)  # in a cell that one rank leaves, the doctor would not wait for the deadline
            return ""
        optimizer.zero_grad()
        try:
            model(own(batch_of(number))).square().mean().backward()
            finish()
            optimizer.step()
        except RuntimeError as error:
            store.set(key, "")
            return str(error)
    return "nothing"


def with_finish(wrapper_class):
    def wrap(module, group):
        model = wrapper_class(module, group=group)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), model.finish_gradient_sync

    return wrap


def with_zero1(module, group):
    return module, ZeRO1(module.parameters(), torch.optim.SGD, group=group, lr=0.1), lambda: None


def with_overlapped_zero1(module, group):
    return module, ZeRO1(module.parameters(), torch.optim.SGD, group=group, module=module, lr=0.1), lambda: None


def with_zero2(module, group):
    model = ZeRO2(module, torch.optim.SGD, group=group, lr=0.1)
    return model, model, model.finish_gradient_sync


LEFT_ALONE = {
    "ManualDDP": (with_finish(ManualDDP), "the other ranks' gradients"),
    "OverlappedDDP": (with_finish(OverlappedDDP), "the other ranks' gradients"),
    "ZeRO1": (with_zero1, "the other ranks' gradients"),
    "ZeRO1 with its module": (with_overlapped_zero1, "the other ranks' gradients"),
    "ZeRO2": (with_zero2, "the other ranks' gradients"),
    "ZeRO3": (with_finish(ZeRO3), "the first unit of a forward"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_at_the_deadline_it_says_what_it_waited_for(four_ranks, name):
    with ranks.world(2):
        message = ranks.run(left_alone, name)[0]
    assert f"rank 0 has waited for {LEFT_ALONE[name][1]}, which did not come" in message, message
    assert "equally often" in message
