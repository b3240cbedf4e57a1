"""Layers and habits from public bug reports, in pipelines, tensor parallelism and checkpoints.

Each trains as one process does, or says what is wrong. The functions without `test_` run on the ranks.
"""

import copy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from shared import models, ranks
from shared.deadlines import scaled
from shared.schedules import parse
from solutions.checkpoints import BackgroundSaver, load_checkpoint, save_checkpoint
from solutions.overlapped_ddp import OverlappedDDP
from solutions.parallel_3d import Parallel3D, make_mesh
from solutions.pipeline import Pipeline
from solutions.production import fully_sharded
from solutions.tensor_parallel import ColumnParallelLinear, RowParallelLinear, parallelize
from solutions.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from solutions.zero1 import ZeRO1
from solutions.zero2 import ZeRO2
from solutions.zero3 import ZeRO3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chapter("pipeline_parallel", "tensor_parallel", "checkpoints", "3d_parallelism"),
]

# -- zero bubble: what is not a plain linear layer takes the ordinary path


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Scaled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return 3 * super().forward(x)


class Shifted(nn.Linear):
    """A subclass that computes its weight."""

    def forward(self, x):
        return F.linear(x, self.weight - self.weight.mean(), self.bias)


class Recomputed(nn.Module):
    def __init__(self, layer, use_reentrant):
        super().__init__()
        self.layer, self.use_reentrant = layer, use_reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.use_reentrant)


class UsedTwice(nn.Module):
    """Calls a layer twice, and also uses its weight directly."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(self.layer(x).tanh()) @ self.layer.weight


def with_hook(layer, register, hook):
    getattr(layer, register)(hook)
    return layer


def halved(layer):
    layer.weight.register_hook(lambda gradient: gradient / 2)
    return layer


def counting(layer):
    """Count the gradients that are accumulated, and clip each as it arrives."""
    layer.weight.count = 0

    def on_gradient(parameter):
        parameter.count += 1
        parameter.grad.clamp_(-0.01, 0.01)

    layer.weight.register_post_accumulate_grad_hook(on_gradient)
    return layer


def monkeypatched(layer):
    layer.forward = lambda x: F.linear(x, 2 * layer.weight, layer.bias)
    return layer


def unfrozen_bias_only(layer):
    layer.weight.requires_grad_(False)
    return layer


LAYERS = {
    "plain": lambda: nn.Linear(8, 8),
    "without bias": lambda: nn.Linear(8, 8, bias=False),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)).eval(),
    "own parametrization": lambda: parametrized(nn.Linear(8, 8)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
    "subclass": lambda: Scaled(8, 8),
    "computed weight": lambda: Shifted(8, 8),
    "own forward": lambda: monkeypatched(nn.Linear(8, 8)),
    "weight's hook": lambda: halved(nn.Linear(8, 8)),
    "hook after accumulation": lambda: counting(nn.Linear(8, 8)),
    "forward hook": lambda: with_hook(nn.Linear(8, 8), "register_forward_hook", lambda *found: 2 * found[-1]),
    "backward hook": lambda: with_hook(
        nn.Linear(8, 8),
        "register_full_backward_hook",
        lambda _, inputs, outputs: tuple(g if g is None else 2 * g for g in inputs),
    ),
    "frozen weight": lambda: unfrozen_bias_only(nn.Linear(8, 8)),
    "recomputed": lambda: Recomputed(nn.Linear(8, 8), False),
    "recomputed, reentrant": lambda: Recomputed(nn.Linear(8, 8), True),
    "used twice": UsedTwice,
    "three dimensions": lambda: nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Linear(8, 8), nn.Flatten()),
}


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def layers_of(kind: str, stages: int) -> list[nn.Module]:
    """Put two layers of a kind on each stage, after a plain one."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return [layer for _ in range(stages) for layer in (nn.Linear(8, 8), LAYERS[kind](), nn.Tanh(), LAYERS[kind]())]
    finally:
        torch.set_default_dtype(torch.float32)


def largest_difference(build, schedule: str, batches: list, loss_fn=F.mse_loss) -> float:
    """Add up gradients over steps. Return the largest difference from one process, which runs the micro-batches."""
    alone, pipeline = nn.Sequential(*build()), Pipeline(build(), schedule, 4, loss_fn)
    for x, y in batches:
        pipeline.step(x.clone(), y)
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (loss_fn(alone(part), target) / 4).backward()
    expected = dict(alone.named_parameters())
    found = 0.0
    for name, parameter in pipeline.stage_parameters().items():
        wanted = expected[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        assert getattr(parameter, "count", 0) == getattr(expected[name], "count", 0)
        found = max(found, 0.0 if wanted is None else (parameter.grad - wanted).abs().max().item())
    return found


def drawn(steps: int) -> list:
    return [torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(steps)]


def of_a_kind(kind: str) -> float:
    stages = dist.get_world_size()
    return max(largest_difference(lambda: layers_of(kind, stages), name, drawn(2)) for name in ("1f1b", "zero_bubble"))


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_one_process(four_ranks, kind):
    with ranks.world(2):
        assert max(ranks.run(of_a_kind, kind)) < 1e-12


def changing_its_input(schedule: str) -> float:
    torch.manual_seed(0)
    layers = [nn.ReLU(inplace=True), nn.Linear(8, 8).double(), nn.Tanh(), nn.Linear(8, 8).double()]
    return largest_difference(lambda: copy.deepcopy(layers), schedule, drawn(1))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_the_first_layer_may_change_the_batch_in_place(four_ranks, schedule):
    with ranks.world(2):
        assert max(ranks.run(changing_its_input, schedule)) < 1e-12


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def of_a_gpt(schedule: str, frozen: tuple[str, ...]) -> float:
    gpt = models.gpt_layers(models.GPTConfig(vocab_size=11, context=4, layers=4, heads=2, width=6)).double()
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(11, (2, 8, 4), generator=generator) for _ in range(2)]
    return largest_difference(lambda: copy.deepcopy(gpt), schedule, batches, token_loss)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("frozen", [(), ("1.up", "2.attention"), ("0.", "1.", "2."), ("0.token",)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_add_up_as_in_one_process(four_ranks, schedule, frozen, world_size):
    with ranks.world(world_size):
        assert max(ranks.run(of_a_gpt, schedule, frozen)) < 1e-12


def under_autocast() -> list[dict]:
    """Return the gradients of 1F1B and zero bubble under autocast, with a step without it in between."""
    found = []
    for schedule in ("1f1b", "zero_bubble"):
        torch.manual_seed(0)
        pipeline = Pipeline([nn.Linear(8, 8) for _ in range(4)], schedule, 4)
        x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
        for enabled in (True, False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                pipeline.step(x, y)
        found.append({name: parameter.grad for name, parameter in pipeline.stage_parameters().items()})
    return found


def test_autocast_behaves_as_in_1f1b(four_ranks):
    with ranks.world(2):
        for one, other in ranks.run(under_autocast):
            for name, gradient in one.items():
                torch.testing.assert_close(gradient, other[name], rtol=1e-2, atol=1e-3)


def outside_of_step() -> bool:
    """Use a stage's layers outside of step(). Return whether they have all gradients, and then train as before."""
    layers = layers_of("plain", dist.get_world_size())
    pipeline = Pipeline(layers, "zero_bubble", 4)
    chunk = pipeline.chunks[0]
    chunk(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    has_gradients = all(parameter.grad is not None for parameter in chunk.parameters())
    copied = copy.deepcopy(chunk)
    copied(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    return has_gradients and not chunk.terms and not copied.terms


def test_layers_can_be_used_outside_of_a_step(four_ranks):
    with ranks.world(2):
        assert all(ranks.run(outside_of_step))


class Several(nn.Module):
    def forward(self, x):
        return x, x


def tied_with_other_values(layers):
    nn.init.constant_(layers[0].weight, dist.get_rank())
    layers[-1].weight = layers[0].weight
    return layers


def tied_by_memory(layers):
    layers[-1].weight = nn.Parameter(layers[0].weight.data)
    return layers


def frozen_on_one_rank(layers):
    layers[0].requires_grad_(dist.get_rank() == 0)
    return layers


def with_a_grad_scaler(_pipeline, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def clip_a_stage(pipeline, _optimizer):
    nn.utils.clip_grad_norm_(pipeline.stage_parameters().values(), 1.0)


def replace_a_weight(pipeline, _optimizer):
    pipeline.chunks[0].layers[0].weight = nn.Parameter(torch.ones(8, 8))


BATCH = torch.ones(8, 8)


def built(change=lambda layers: layers, layers=2, samples=8, **options):
    """Build a pipeline of changed layers, and run a step."""

    def run():
        given = [nn.Linear(8, 8) for _ in range(layers)]
        Pipeline(change(given), **{"micro_batches": 4, **options}).step(BATCH[:samples], BATCH[:samples])

    return run


def used(use):
    """Build a pipeline, use it or its optimizer, and run a step."""

    def run():
        pipeline = Pipeline([nn.Linear(8, 8), nn.Linear(8, 8)], "1f1b", 4)
        use(pipeline, torch.optim.SGD(pipeline.stage_parameters().values(), lr=0.1))
        pipeline.step(BATCH, BATCH)

    return run


def after_an_error(pipeline, _optimizer):
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        hook = pipeline.chunks[0].register_forward_pre_hook(lambda *_: 1 / 0)
        pipeline.step(BATCH, BATCH)
    hook.remove()


OF_ONE_STAGE = {
    "uneven targets": (used(lambda pipeline, _: pipeline.step(BATCH, BATCH[:7])), "7 targets cannot be cut"),
    "several outputs": (built(lambda layers: [Several() for _ in layers]), "must return one tensor"),
    "after an error": (used(after_an_error), "an earlier step() ended with an error"),
}
OF_TWO_STAGES = {
    "tied, with other values": (built(tied_with_other_values), "0.weight, which several layers share"),
    "tied by memory": (built(tied_by_memory), "'1.weight' share memory"),
    "frozen on one rank": (built(frozen_on_one_rank), "0.weight: [8, 8] in torch.float32, frozen"),
    "another layer on one rank": (built(lambda layers: layers + [nn.Linear(8, 8)] * dist.get_rank()), "2.weight"),
    "a wrapped layer": (
        built(lambda layers: [nn.Sequential(OverlappedDDP(layers[0])), layers[1]]),
        "layer '0.0' is a OverlappedDDP, whose ranks are stages",
    ),
    "a sharded layer": (
        built(lambda layers: [layers[0], ZeRO3(layers[1])]),
        "layer '1' is a ZeRO3, whose ranks are stages",
    ),
    "GradScaler": (used(with_a_grad_scaler), "train in bfloat16"),
    "torch's clipping": (used(clip_a_stage), "call clip_grad_norm_() of the Pipeline"),
    "a weight is replaced": (used(replace_a_weight), "build the Pipeline again"),
    "one layer": (built(layers=1), "1 layers cannot be split into 2 chunks"),
    "few layers for chunks": (built(layers=3, schedule="interleaved"), "3 layers cannot be split into 4 chunks"),
    "an incomplete set": (
        built(layers=4, samples=6, schedule="interleaved", micro_batches=3),
        "needs a multiple of 2 micro-batches",
    ),
    "no such schedule": (
        built(layers=4, schedule="fast"),
        "there is no schedule 'fast': choose one of gpipe, 1f1b, interleaved, zero_bubble",
    ),
    "uneven samples": (built(layers=4, samples=6), "a batch of 6 samples cannot be cut into 4 equal micro-batches"),
    "a backward is missing": (built(layers=4, schedule=parse("F0 B0\nF0")), "stage 1 never runs B0"),
}


# -- tensor parallelism


class SplitMLP(nn.Module):
    def __init__(self, up: nn.Linear, down: nn.Linear):
        super().__init__()
        self.up, self.down = ColumnParallelLinear.from_linear(up), RowParallelLinear.from_linear(down)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def split_pair() -> tuple[SplitMLP, nn.Sequential]:
    torch.manual_seed(0)
    up, down = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    return SplitMLP(up, down), nn.Sequential(up, nn.Tanh(), down)


def split_training(optimizer_cls) -> None:
    split, alone = split_pair()
    for model in (split, alone):
        optimizer = optimizer_cls(model.parameters(), lr=0.01)
        for number in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
    wanted = alone[0].weight.chunk(dist.get_world_size())[dist.get_rank()]
    torch.testing.assert_close(split.up.weight, wanted)
    torch.testing.assert_close(split.down.bias, alone[2].bias)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "NAdam", "RMSprop", "Rprop"])
def test_split_layers_train_with_any_optimizer_of_elements(four_ranks, name):
    with ranks.world(2):
        ranks.run(split_training, getattr(torch.optim, name))


def unusual_inputs() -> None:
    split, alone = split_pair()
    whole = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for x in (whole.t()[:3], whole[:0], whole[0], whole.view(2, 4, 8), whole[:1].expand(3, 8)):
        inputs = [x.double().requires_grad_() for _ in range(2)]
        for model, its in zip((split, alone), inputs, strict=True):
            model(its).square().sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(split.up.weight.grad, alone[0].weight.grad.chunk(2)[dist.get_rank()])


def test_split_layers_take_unusual_inputs(four_ranks):
    with ranks.world(2):
        ranks.run(unusual_inputs)


def frozen_layers() -> None:
    linear = nn.Linear(8, 8)
    linear.weight.requires_grad_(False)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        own = kind.from_linear(linear)
        assert not own.weight.requires_grad and own.bias.requires_grad
    embedding = nn.Embedding(6, 4)
    embedding.requires_grad_(False)
    assert not VocabParallelEmbedding.from_embedding(embedding).weight.requires_grad


def padding_index(padding_idx: int) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(7, 4, padding_idx=padding_idx)
    own = VocabParallelEmbedding.from_embedding(embedding)
    tokens = torch.tensor([0, 1, padding_idx % 7, 6, 3])
    own(tokens).square().sum().backward()
    embedding(tokens).square().sum().backward()
    rows = len(own.weight)
    expected = torch.zeros(rows * dist.get_world_size(), 4)
    expected[:7] = embedding.weight.grad
    mine = expected[dist.get_rank() * rows :][:rows]
    torch.testing.assert_close(own.weight.grad, mine)


def ignored_targets(targets: list[int], ignore_index: int) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    logits = torch.randn(len(targets), 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole, shard = logits.clone().requires_grad_(), logits.chunk(world, -1)[rank].clone().requires_grad_()
    wanted = F.cross_entropy(whole, torch.tensor(targets), ignore_index=ignore_index)
    found = vocab_parallel_cross_entropy(shard, torch.tensor(targets), ignore_index=ignore_index)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    if not wanted.isnan():
        wanted.backward()
        found.backward()
        torch.testing.assert_close(shard.grad, whole.grad.chunk(world, -1)[rank])


@pytest.mark.parametrize(
    ("targets", "ignore_index"),
    [([1, 5, -100, 7, -100, 0], -100), ([1, 5, 3], -100), ([-1, 2], -1), ([0, 0, 3], 0), ([-100, -100], -100)],
)
def test_targets_that_the_loss_ignores(four_ranks, targets, ignore_index):
    with ranks.world(2):
        ranks.run(ignored_targets, targets, ignore_index)


@pytest.mark.parametrize("padding_idx", [0, 1, 5, -1])
def test_a_padding_index_gets_no_gradient(four_ranks, padding_idx):
    with ranks.world(2):
        ranks.run(padding_index, padding_idx)


def test_frozen_layers_stay_frozen(four_ranks):
    with ranks.world(2):
        ranks.run(frozen_layers)


def hooked():
    return with_hook(nn.Linear(8, 8), "register_forward_hook", lambda *found: 2 * found[-1])


def embed(**settings):
    return VocabParallelEmbedding.from_embedding(nn.Embedding(6, 4, **settings))


def unknown_token(token):
    VocabParallelEmbedding.from_embedding(nn.Embedding(7, 4))(torch.tensor([0, token]))


def tiny_gpt(layers: int = 1) -> models.TinyGPT:
    return models.TinyGPT(models.GPTConfig(vocab_size=8, context=4, layers=layers, heads=2, width=8), 0)


def wrong_3d():
    mesh = make_mesh(1, 1, dist.get_world_size())
    model = tiny_gpt(layers=2)
    trainer = Parallel3D(model, mesh, torch.optim.SGD, micro_batches=2, lr=0.1)
    tokens = torch.zeros(4, 4, dtype=torch.int64)
    targets = tokens.clone()
    targets[0, :2] = -100
    trainer.step(tokens, targets)


def split_step(use, optimizer_cls=torch.optim.SGD):
    split, _ = split_pair()
    optimizer = optimizer_cls(split.parameters(), lr=0.1)
    split(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    use(split, optimizer)


def penalty(*_):
    split, _ = split_pair()
    x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
    torch.autograd.grad(split(x).square().sum(), x, create_graph=True)[0].square().sum().backward()


def another_seed(split):
    torch.manual_seed(dist.get_rank())
    split()


def another_norm():
    model = tiny_gpt()
    nn.init.constant_(model.norm.weight, dist.get_rank())
    parallelize(model)


def tied_by_memory_in_gpt():
    model = tiny_gpt()
    model.output.weight = nn.Parameter(model.token_embedding.weight.data)
    parallelize(model)


def position_max_norm():
    model = tiny_gpt()
    model.position_embedding.max_norm = 1.0
    parallelize(model)


def reentrant_checkpoint():
    model = tiny_gpt()
    parallelize(model, sequence_parallel=True)
    forward = model.blocks[0].forward
    model.blocks[0].forward = lambda x: checkpoint(forward, x, use_reentrant=True)
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))


def normalized_later(normalize):
    """Put a parametrization on layers that are split already."""
    split, _ = split_pair()
    for layer in split.children():
        normalize(layer)
    split(torch.ones(2, 8, dtype=torch.float64))


def normalized_embedding():
    parametrizations.spectral_norm(embedding := embed())(torch.tensor([0, 5]))
    return embedding


def state_of_rank_0():
    split, _ = split_pair()
    optimizer, resumed = (torch.optim.AdamW(split.parameters(), lr=0.1) for _ in range(2))
    split(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    optimizer.step()
    states = [optimizer.state_dict()]
    dist.broadcast_object_list(states)
    resumed.load_state_dict(states[0])
    if dist.get_rank() == 0:  # whose own state it is
        raise RuntimeError("the state of rank 0 of 2, for rank 1 of 2")
    resumed.step()


def other_masks():
    model = tiny_gpt()
    model.norm = nn.Sequential(model.norm, nn.Dropout(0.5))
    parallelize(model)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    model.eval()
    another_seed(lambda: model(tokens, tokens))
    model.train()
    another_seed(lambda: model(tokens, tokens))


SPLIT_REFUSES = {
    "weight_norm after splitting": (
        lambda: normalized_later(parametrizations.weight_norm),
        "'weight' of a ParametrizedColumnParallelLinear is computed",
    ),
    "old weight_norm after splitting": (lambda: normalized_later(nn.utils.weight_norm), "weight_v [4, 8]"),
    "spectral_norm of an embedding": (normalized_embedding, "VocabParallelEmbedding is computed"),
    "rank 0's state": (state_of_rank_0, "the state of rank 0 of 2, for rank 1 of 2"),
    "other dropout masks": (other_masks, "norm.1 with random state"),
    "reentrant checkpointing": (reentrant_checkpoint, "pass use_reentrant=False"),
    "max_norm of positions": (position_max_norm, "position_embedding has a max_norm"),
    "tied by memory": (tied_by_memory_in_gpt, "'token_embedding.weight' share memory"),
    "torch's clipping": (
        lambda: split_step(lambda split, _: nn.utils.clip_grad_norm_(split.parameters(), 1.0)),
        "add up the squares over the ranks",
    ),
    "GradScaler": (lambda: split_step(with_a_grad_scaler), "train in bfloat16"),
    "Adafactor": (
        lambda: split_step(lambda _, optimizer: optimizer.step(), torch.optim.Adafactor),
        "each element by itself",
    ),
    "gradient penalty": (penalty, "differentiate twice"),
    "other values": (lambda: another_seed(lambda: RowParallelLinear.from_linear(nn.Linear(8, 8))), "bias: [8]"),
    "other embeddings": (lambda: another_seed(lambda: embed()), "weight: [6, 4]"),
    "another norm": (another_norm, "norm.weight: [8]"),
    "weight_norm": (lambda: ColumnParallelLinear.from_linear(LAYERS["weight_norm"]()), "parametrization"),
    "old weight_norm": (lambda: RowParallelLinear.from_linear(LAYERS["old weight_norm"]()), "hooks"),
    "pruned": (lambda: RowParallelLinear.from_linear(LAYERS["pruned"]()), "hooks"),
    "subclass": (lambda: ColumnParallelLinear.from_linear(Scaled(8, 8)), "forward() of its own"),
    "forward hook": (lambda: ColumnParallelLinear.from_linear(hooked()), "hooks"),
    "weight's hook": (lambda: RowParallelLinear.from_linear(halved(nn.Linear(8, 8))), "hooks"),
    "max_norm": (lambda: embed(max_norm=1.0), "max_norm"),
    "scale_grad_by_freq": (lambda: embed(scale_grad_by_freq=True), "scale_grad_by_freq"),
    "sparse": (lambda: embed(sparse=True), "sparse"),
    "token 7 of 7": (lambda: unknown_token(7), "there is a token 7"),
    "token -1": (lambda: unknown_token(-1), "there is a token -1"),
    "target 8 of 8": (
        lambda: vocab_parallel_cross_entropy(torch.zeros(1, 4), torch.tensor([8])),
        "there is a token 8",
    ),
    "unevenly ignored targets": (wrong_3d, "equally many"),
}


REFUSED = {"a pipeline": OF_ONE_STAGE, "two stages": OF_TWO_STAGES, "split layers": SPLIT_REFUSES}


def refused(what: str, case: str) -> str:
    torch.manual_seed(0)
    try:
        REFUSED[what][case][0]()
    except (ValueError, IndexError, RuntimeError, TypeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("what", "case"), [(what, case) for what, cases in REFUSED.items() for case in cases])
def test_what_cannot_be_right_is_said_on_every_rank(four_ranks, what, case):
    with ranks.world(1 if what == "a pipeline" else 2):
        for message in ranks.run(refused, what, case):
            assert REFUSED[what][case][1] in message, message


SCALES_BY_ITS_OWN_NORM = """
import os
import torch
from torch import nn
from shared.guards import calls
from shared.sharded import parts

for guards in ((parts._guard_torch, calls.guard_torch), (calls.guard_torch, parts._guard_torch)):
    if os.fork() == 0:
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        for guard in guards:
            guard()
        parts.mark([parameter], instead_of_clipping="refused")
        nn.utils.clip_grads_with_norm_([parameter], 1.0, torch.tensor(2.0))
        try:
            nn.utils.clip_grad_norm_([parameter], 1.0)
        except RuntimeError as error:
            print([round(each, 3) for each in parameter.grad.tolist()], error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.exhaustive
def test_gradients_can_be_scaled_by_a_norm_of_the_whole_model_whichever_guard_is_first():
    command = [sys.executable, "-c", SCALES_BY_ITS_OWN_NORM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60))
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all(line.startswith("[0.5, 0.5]") and "refused" in line for line in lines), lines


# -- checkpoints


class Used(nn.Module):
    """Uses its second layer only if it is told to."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.uses_both = nn.Linear(4, 4), nn.Linear(4, 4), False
        self.history = (1.0,)

    def forward(self, x):
        return self.always(x) + self.sometimes(x) if self.uses_both else self.always(x)


class Remembering(Used):
    def get_extra_state(self):
        return {"history": self.history}

    def set_extra_state(self, state):
        self.history = state["history"]


def new_run(kind=Used, seed=0, optimizer=torch.optim.AdamW, **settings):
    torch.manual_seed(seed)
    model = fully_sharded(kind())
    return model, optimizer(model.parameters(), **({"lr": 0.1} | settings))


def train(model, optimizer, steps, scheduler=None):
    for number in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def values(model) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def saved_later(path: Path, model, optimizer) -> None:
    """Save in the background, overwrite everything before anything is written, and restore it."""
    write, may_write = FileSystemWriter.write_data, threading.Event()

    def write_later(*args):
        may_write.wait(60)
        return write(*args)

    tensors = [*model.state_dict().values(), *(value for each in optimizer.state.values() for value in each.values())]
    before = [tensor.clone() for tensor in tensors]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(FileSystemWriter, "write_data", write_later)
        saver = BackgroundSaver()
        saver.save(path, 3, model, optimizer)
        for tensor in tensors:
            tensor.fill_(7)
        may_write.set()
        saver.wait()
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


def continued(folder: str, case: str) -> None:
    """Save and resume. The resumed run must go on as the first one does."""
    path, kind = Path(folder), Remembering if case == "extra state" else Used
    optimizer_cls = torch.optim.SGD if case == "plain SGD" else torch.optim.AdamW
    model, optimizer = new_run(kind, optimizer=optimizer_cls)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if "scheduler" in case else None
    train(model, optimizer, range(2 if case != "before the first step" else 0), scheduler)
    if case == "different steps":
        model.uses_both = True
        train(model, optimizer, range(2, 3))
    if case == "gradients":
        model(torch.ones(2, 4)).square().mean().backward()
    model.history = (1.0, 2.0)
    gradients = [parameter.grad for parameter in model.parameters()]
    if case == "in the background":
        saver = BackgroundSaver()
        saver.save(path, 3, model, optimizer)
        saver.wait()
    elif case == "trained while it is written":
        saved_later(path, model, optimizer)
    else:
        save_checkpoint(path, 3, model, optimizer)
    assert [parameter.grad for parameter in model.parameters()] == gradients or case != "gradients"
    if case == "before the first step":
        assert not optimizer.state
    resumed, its_optimizer = new_run(kind, seed=1, optimizer=optimizer_cls)
    its_scheduler = None
    if case == "new scheduler":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if case in ("gradients", "going back"):
        resumed.uses_both = case == "going back"
        train(resumed, its_optimizer, range(7, 8))
        resumed(torch.ones(2, 4)).square().mean().backward()
        resumed.uses_both = False
    if case == "new scheduler":
        its_scheduler = torch.optim.lr_scheduler.StepLR(its_optimizer, 1, 0.5)
    assert load_checkpoint(path / "step_3", resumed, its_optimizer) == 3
    if "scheduler" in case and its_scheduler is None:
        its_scheduler = torch.optim.lr_scheduler.StepLR(its_optimizer, 1, 0.5)
        its_scheduler.load_state_dict(scheduler.state_dict())
    assert resumed.history == model.history or kind is Used
    for one in (model, resumed):
        one.uses_both = True
    train(model, optimizer, range(3, 6), scheduler)
    train(resumed, its_optimizer, range(3, 6), its_scheduler)
    for one, other in zip(values(model), values(resumed), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "case",
    [
        "never had a gradient",
        "different steps",
        "gradients",
        "extra state",
        "plain SGD",
        "before the first step",
        "scheduler",
        "new scheduler",
        "going back",
        "in the background",
        "trained while it is written",
    ],
)
def test_a_run_resumes_what_it_was(four_ranks, tmp_path, case):
    with ranks.world(2):
        ranks.run(continued, str(tmp_path), case)


class Larger(Used):
    def __init__(self):
        super().__init__()
        self.third = nn.Linear(4, 4)


def refused_checkpoint(folder: str, case: str) -> str:
    model, optimizer = new_run(Larger if case == "a larger model" else Used)
    train(model, optimizer, range(1))
    save_checkpoint(Path(folder), 1, model, optimizer)
    resumed, its_optimizer = new_run(optimizer=torch.optim.SGD if case == "another optimizer" else torch.optim.AdamW)
    if case == "frozen":
        resumed.always.requires_grad_(False)
    try:
        load_checkpoint(Path(folder) / "step_1", resumed, its_optimizer)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "words"),
    [("a larger model", "third.weight"), ("another optimizer", "always.weight"), ("frozen", "always.weight")],
)
def test_a_checkpoint_says_what_is_wrong(four_ranks, tmp_path, case, words):
    with ranks.world(2):
        for message in ranks.run(refused_checkpoint, str(tmp_path), case):
            assert words in message


def refused_shards(folder: str, kind: str) -> str:
    """Save what a sharded wrapper of the course has. torch's get_state_dict() would lose what other ranks hold."""
    model, optimizer = Used(), None
    if kind == "ZeRO1":
        optimizer = ZeRO1(model.parameters(), torch.optim.AdamW, lr=0.1)
    elif kind == "ZeRO2":
        model = ZeRO2(model, torch.optim.AdamW, lr=0.1)
        optimizer = model.optimizer
    else:
        model = ZeRO3(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    try:
        save_checkpoint(Path(folder), 1, model, optimizer)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "words"),
    [("ZeRO1", "optimizer.state_dict()"), ("ZeRO2", "optimizer.state_dict()"), ("ZeRO3", "full_state_dict()")],
)
def test_a_checkpoint_refuses_shards_that_torch_does_not_know(four_ranks, tmp_path, kind, words):
    with ranks.world(2):
        for message in ranks.run(refused_shards, str(tmp_path), kind):
            assert words in message


def averaged(folder: str) -> None:
    """Save and load an average of the weights."""
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Used()
        average = AveragedModel(model)
        train(model, torch.optim.AdamW(model.parameters(), lr=0.1), range(2))
        average.update_parameters(model)
        runs.append((average, torch.optim.SGD(average.parameters(), lr=0.1)))
    save_checkpoint(Path(folder), 1, *runs[0])
    load_checkpoint(Path(folder) / "step_1", *runs[1])
    for (name, one), (_, other) in zip(*(average.state_dict().items() for average, _ in runs), strict=True):
        assert torch.equal(one, other), name


def test_an_average_is_saved(four_ranks, tmp_path):
    with ranks.world(2):
        ranks.run(averaged, str(tmp_path))
