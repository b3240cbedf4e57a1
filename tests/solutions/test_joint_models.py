"""Models that ranks compute together, of chapters 14 and 16: they train as one process does, or raise on every rank.

Each case runs on the ranks. It returns None if everything was right, or says what was not. A case that must raise names
the words that the error has to contain.
"""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shared import ranks
from shared.models import GPTConfig, RotaryGPT, TinyGPT, with_experts
from solutions.context_parallel import ContextParallelGPT
from solutions.course_strategies import ExpertParallelModel, loss_of_tokens
from solutions.expert_parallel import MoE
from solutions.manual_ddp import ManualDDP
from solutions.overlapped_ddp import OverlappedDDP
from solutions.tensor_parallel import parallelize
from solutions.zero1 import ZeRO1
from solutions.zero2 import ZeRO2
from solutions.zero3 import ZeRO3

pytestmark = [pytest.mark.chapter("context_parallel", "expert_parallel"), pytest.mark.slow]

CONFIG = GPTConfig(vocab_size=11, context=16, layers=1, heads=4, width=8)
ADAMW = {"lr": 0.05, "weight_decay": 0.1}


def rotary_gpt(seed=0):
    return RotaryGPT(CONFIG, seed).double()


def gpt_with_experts(seed=0):
    return with_experts(TinyGPT(CONFIG, seed), lambda width: MoE(width, 8, experts=4, top_k=2), seed).double()


def batch(number=0):
    windows = torch.randint(0, 11, (4, 17), generator=torch.Generator().manual_seed(number))
    return windows[:, :-1], windows[:, 1:]


class Context:
    """All ranks have the same batch. The model takes targets, and returns the loss of the whole batch."""

    build, wrap = staticmethod(rotary_gpt), staticmethod(ContextParallelGPT)

    @staticmethod
    def loss(model, number=0):
        tokens, targets = batch(number)
        return (
            model(tokens, targets) if isinstance(model, ContextParallelGPT) else loss_of_tokens(model(tokens), targets)
        )


class Experts:
    """Each rank has samples of its own. The model returns logits."""

    build = staticmethod(gpt_with_experts)

    @staticmethod
    def wrap(module):
        return ExpertParallelModel(module, None)

    @staticmethod
    def loss(model, number=0):
        tokens, targets = batch(number)
        if isinstance(model, ExpertParallelModel):
            tokens, targets = (rows.chunk(dist.get_world_size())[dist.get_rank()] for rows in (tokens, targets))
        return loss_of_tokens(model(tokens), targets)


def finish(model):
    getattr(model, "finish_gradient_sync", lambda: None)()


def step(kind, model, optimizer, number=0, between=lambda: None):
    optimizer.zero_grad()
    loss = kind.loss(model, number)
    loss.backward()
    finish(model)
    between()
    optimizer.step()
    return loss


def differs_from_one_process(kind, train, prepare=lambda module: None):
    """Train on the ranks and in one process. Returns what differs, or None."""
    alone, module = kind.build(), kind.build()
    prepare(alone)
    prepare(module)
    train(alone, alone, torch.optim.AdamW(alone.parameters(), **ADAMW))
    model = kind.wrap(module)
    train(model, module, torch.optim.AdamW(model.parameters(), **ADAMW))
    expected = dict(alone.named_parameters())
    for name, found in module.named_parameters():
        if not torch.allclose(found, expected[name], rtol=0, atol=1e-9):
            return f"{name} differs by {(found - expected[name]).abs().max():.2e}"
    return None


# Trainings that must equal those of one process. Each gets the kind, the model, its module and an optimizer.


def plainly(kind, model, module, optimizer):
    for number in range(3):
        step(kind, model, optimizer, number)


def finishing_twice(kind, model, module, optimizer):
    for number in range(3):
        step(kind, model, optimizer, number, between=partial(finish, model))


def accumulating(kind, model, module, optimizer):
    for number in range(0, 6, 2):
        optimizer.zero_grad(set_to_none=number == 2)
        for micro_batch in (number, number + 1):
            (kind.loss(model, micro_batch) / 2).backward()
        finish(model)
        optimizer.step()


def zeroing_in_place(kind, model, module, optimizer):
    for number in range(3):
        kind.loss(model, number).backward()
        finish(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def skipping_a_batch(kind, model, module, optimizer):
    for number in range(4):
        optimizer.zero_grad()
        kind.loss(model, number).backward()
        if number != 1:
            finish(model)
            optimizer.step()


def skipping_a_finished_batch(kind, model, module, optimizer):
    for number in range(4):
        optimizer.zero_grad()
        kind.loss(model, number).backward()
        finish(model)
        if number != 1:
            optimizer.step()


def evaluating_between(kind, model, module, optimizer):
    for number in range(3):
        step(kind, model, optimizer, number)
        model.eval()
        with torch.no_grad():
            kind.loss(model, number + 7)
        model.train()
        kind.loss(model, number + 8)  # with a graph that nobody uses


def with_a_scheduler(kind, model, module, optimizer):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number in range(3):
        step(kind, model, optimizer, number)
        scheduler.step()


def interrupted_in_backward(kind, model, module, optimizer):
    for number in range(3):
        if number == 1:
            optimizer.zero_grad()
            loss = kind.loss(model, 9)
            handle = module.norm.weight.register_hook(lambda _: 1 / 0)
            try:
                loss.backward()
            except ZeroDivisionError:
                handle.remove()
        step(kind, model, optimizer, number)


def resuming(kind, model, module, optimizer):
    step(kind, model, optimizer, 0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(kind, model, optimizer, 1)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step(kind, model, optimizer, 2)


def clipping_with_torch(kind, model, module, optimizer):
    for number in range(3):
        step(kind, model, optimizer, number, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01))


def with_an_unused_layer(module):
    module.unused = nn.Linear(3, 3).double()
    torch.nn.init.ones_(module.unused.weight)
    torch.nn.init.ones_(module.unused.bias)


def with_a_frozen_embedding(module):
    module.token_embedding.requires_grad_(False)


def with_a_frozen_block(module):
    module.blocks[0].requires_grad_(False)


def with_tied_embeddings(module):
    module.output.weight = module.token_embedding.weight


TRAININGS = (
    plainly,
    finishing_twice,
    accumulating,
    zeroing_in_place,
    skipping_a_batch,
    skipping_a_finished_batch,
    evaluating_between,
    with_a_scheduler,
    interrupted_in_backward,
    resuming,
)
PREPARED = (with_an_unused_layer, with_a_frozen_embedding, with_a_frozen_block, with_tied_embeddings)


def trains_a_copy(kind):
    """A copy of a wrapper trains by itself, and the original as if there were no copy."""
    model = kind.wrap(kind.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(kind, model, optimizer)
    other = copy.deepcopy(model)
    loss = step(kind, other, torch.optim.SGD(other.parameters(), lr=0.1), 1)
    again = step(kind, model, optimizer, 1)
    if not torch.equal(loss, again):
        return f"the copy has the loss {loss}, and the original {again}"
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return None if all(torch.equal(ours, theirs) for ours, theirs in pairs) else "they differ after the step"


def alternates(kind):
    """Two models take turns, as in a GAN."""
    alone = [kind.build(seed) for seed in (0, 1)]
    models = [kind.wrap(kind.build(seed)) for seed in (0, 1)]
    losses = []
    for pair in (alone, models):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
        for number in range(4):
            step(kind, pair[number % 2], optimizers[number % 2], number)
        with torch.no_grad():
            losses.append(torch.stack([kind.loss(model, 9) for model in pair]))
    if kind is Experts:  # each rank's loss is that of its own samples
        dist.all_reduce(losses[1])
        losses[1] /= dist.get_world_size()
    return None if torch.allclose(*losses, rtol=0, atol=1e-9) else f"losses {losses[1]}, alone {losses[0]}"


# Mistakes. Each must raise on every rank.


def wrapped(kind):
    model = kind.wrap(kind.build())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def steps_before_finishing(kind):
    model, optimizer = wrapped(kind)
    kind.loss(model).backward()
    optimizer.step()


def clips_before_finishing(kind):
    model, _ = wrapped(kind)
    kind.loss(model).backward()
    nn.utils.clip_grad_value_([parameter for name, parameter in model.named_parameters() if "norm" in name], 1)


def forgets_zero_grad(kind):
    model, optimizer = wrapped(kind)
    step(kind, model, optimizer)
    kind.loss(model, 1).backward()


def finishes_each_micro_batch(kind):
    model, _ = wrapped(kind)
    for number in range(2):
        kind.loss(model, number).backward()
        finish(model)


def different_models(kind):
    kind.wrap(kind.build(seed=dist.get_rank()))


def a_model_with_another_layer(kind):
    module = kind.build()
    if dist.get_rank() == 1:
        module.added = nn.Linear(2, 2)
    kind.wrap(module)


def another_batch_on_each_rank(kind):
    model = kind.wrap(kind.build())
    model(*batch(dist.get_rank()))


def another_batch_for_a_split_model(kind):
    model = parallelize(TinyGPT(CONFIG))
    model(*batch(dist.get_rank()))


def keeps_a_graph(kind):
    model, _ = wrapped(kind)
    kind.loss(model).backward(create_graph=True)
    finish(model)


def changed(kind, change, everywhere):
    """Change the module after one step, on all ranks or only on the last one."""
    module = kind.build()
    model = kind.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(kind, model, optimizer)
    if everywhere or dist.get_rank() == dist.get_world_size() - 1:
        change(module)
    step(kind, model, optimizer, 1)


CHANGES = {
    "freeze": lambda m: m.blocks[0].norm_1.weight.requires_grad_(False),
    "assign": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
    "replace": lambda m: setattr(m, "norm", nn.LayerNorm(8).double()),
    "add": lambda m: setattr(m, "added", nn.Linear(2, 2).double()),
}


# Combinations that would train something else, without an error.


def one_layer_twice():
    module = gpt_with_experts()
    module.blocks.append(copy.deepcopy(module.blocks[0]))
    module.blocks[1].experts = module.blocks[0].experts
    Experts.wrap(module)


def routers_that_share_a_weight():
    module = gpt_with_experts()
    module.blocks.append(copy.deepcopy(module.blocks[0]))
    module.blocks[1].experts.router.weight = module.blocks[0].experts.router.weight
    Experts.wrap(module)


def a_hook_on_experts():
    module = gpt_with_experts()
    module.blocks[0].experts.register_forward_hook(lambda layer, inputs, output: 2 * output)
    Experts.wrap(module)


def a_parameter_beside_the_experts():
    module = gpt_with_experts()
    module.blocks[0].experts.scale = nn.Parameter(torch.ones(()))
    Experts.wrap(module)


def a_mixture_by_itself():
    torch.manual_seed(0)
    Experts.wrap(MoE(8, 8, experts=4, top_k=2))


def an_optimizer_of_before(build, wrap, loss):
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = wrap(module)
    loss(model).backward()
    finish(model)
    optimizer.step()


def another_optimizer_for_zero2():
    model = ZeRO2(nn.Linear(4, 4), torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    model.finish_gradient_sync()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def averaged_over_the_same_ranks(wrap):
    wrap(ContextParallelGPT(rotary_gpt()))


def a_forgotten_sum_before_zero1():
    model = ContextParallelGPT(rotary_gpt())
    optimizer = ZeRO1(model.parameters(), torch.optim.SGD, lr=0.1)
    Context.loss(model).backward()
    optimizer.step()


def a_split_model_over_the_same_ranks(wrap):
    wrap(parallelize(TinyGPT(CONFIG)))


class Smoothed(RotaryGPT):
    def predict(self, x, targets, **attending):
        return 2 * super().predict(x, targets, **attending)


def a_loss_of_its_own():
    ContextParallelGPT(Smoothed(CONFIG))


def a_layer_that_mixes_tokens():
    gpt = rotary_gpt()
    gpt.blocks[0].norm_2 = nn.BatchNorm1d(16)
    ContextParallelGPT(gpt)


def a_norm_over_tokens():
    gpt = rotary_gpt()
    gpt.blocks[0].norm_2 = nn.GroupNorm(2, 16)
    ContextParallelGPT(gpt)


def a_split_model_without_its_kind_of_positions():
    parallelize(rotary_gpt())


class Normalized(torch.optim.SGD):
    """Divides each gradient by the norm of all gradients."""

    def step(self, closure=None):
        gradients = [parameter.grad for parameter in self.param_groups[0]["params"]]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient /= norm
        return super().step(closure)


def an_optimizer_of_all_parameters_at_once(optimizer_cls):
    model = Experts.wrap(Experts.build())
    optimizer = optimizer_cls(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = Experts.loss(model)
        loss.backward()
        finish(model)
        return loss

    optimizer.step(closure)


WRAPPERS = (ManualDDP, OverlappedDDP, ZeRO3, partial(ZeRO2, optimizer_cls=torch.optim.SGD, lr=0.1))
COMBINATIONS = [
    ("the same parameter", one_layer_twice),
    ("the same parameter", routers_that_share_a_weight),
    ("hooks", a_hook_on_experts),
    ("parameters or layers of its own", a_parameter_beside_the_experts),
    ("wrap the model that contains it", a_mixture_by_itself),
    ("build it after wrapping", an_optimizer_of_before, gpt_with_experts, Experts.wrap, Experts.loss),
    ("build it after splitting", an_optimizer_of_before, partial(TinyGPT, CONFIG), parallelize, lambda m: m(*batch())),
    ("step() of ZeRO1 or ZeRO2", another_optimizer_for_zero2),
    *[("each parameter by itself", an_optimizer_of_all_parameters_at_once, c) for c in (torch.optim.LBFGS, Normalized)],
    *[("pass group=", averaged_over_the_same_ranks, wrap) for wrap in WRAPPERS],
    ("call finish_gradient_sync()", a_forgotten_sum_before_zero1),
    *[("split over ranks", a_split_model_over_the_same_ranks, wrap) for wrap in WRAPPERS],
    ("predict() is not that of RotaryGPT", a_loss_of_its_own),
    ("mixes tokens", a_layer_that_mixes_tokens),
    ("mixes tokens", a_norm_over_tokens),
    ("forward() is not that of TinyGPT", a_split_model_without_its_kind_of_positions),
]


def run_combinations() -> dict[str, str]:
    found = {}
    for number, (words, case, *args) in enumerate(COMBINATIONS):
        message = message_of(case, *args)
        if words not in message:
            found[f"{number}, {case.__name__}"] = message or "raised nothing"
    return found


FINISH, ONCE, WRAP = "call finish_gradient_sync()", "finish_gradient_sync() once", "after the module was wrapped"
RAISES = {
    steps_before_finishing: FINISH,
    clips_before_finishing: FINISH,
    forgets_zero_grad: ONCE,
    finishes_each_micro_batch: ONCE,
    different_models: "the ranks' models differ",
    a_model_with_another_layer: "the ranks' models differ",
    keeps_a_graph: "create_graph=True",
}


def message_of(case, *args) -> str:
    try:
        return case(*args) or ""
    except Exception as error:  # what it is does not matter: its words are compared
        return f"{type(error).__name__}: {error}"


def run_cases(kind) -> dict[str, str]:
    """Run all cases of a kind. Returns what went wrong, by case."""
    torch.set_num_threads(1)
    found, raises, trainings = {}, dict(RAISES), TRAININGS
    if kind is Context:
        trainings += (clipping_with_torch,)
        raises |= dict.fromkeys(
            (another_batch_on_each_rank, another_batch_for_a_split_model), "the ranks' batches differ"
        )
    for train in trainings:
        found[train.__name__] = message_of(differs_from_one_process, kind, partial(train, kind))
    for prepare in PREPARED:
        found[prepare.__name__] = message_of(differs_from_one_process, kind, partial(plainly, kind), prepare)
    for case in (trains_a_copy, alternates):
        found[case.__name__] = message_of(case, kind)
    wrong = {name: problem for name, problem in found.items() if problem}
    for case, words in raises.items():
        message = message_of(case, kind)
        if words not in message:
            wrong[case.__name__] = message or "raised nothing"
    for name, change in CHANGES.items():
        for everywhere in (True, False):
            message = message_of(changed, kind, change, everywhere)
            if WRAP not in message:
                wrong[f"{name}, {'all ranks' if everywhere else 'one rank'}"] = message or "raised nothing"
    return wrong


@pytest.mark.parametrize("kind", [Context, Experts])
def test_joint_models(kind, four_ranks):
    assert ranks.run(run_cases, kind) == [{}] * 4


def test_combinations_that_would_be_wrong_are_refused(four_ranks):
    with ranks.world(2):
        assert ranks.run(run_combinations) == [{}] * 2
