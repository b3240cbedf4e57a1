"""The checks for model parallelism pass right toy models, however they are written, and fail each wrong one."""

import subprocess
import sys

import pytest

from shared import ranks
from shared.checks.engine.framework import run_exercise
from shared.deadlines import scaled
from tests import model_parallel_toys as toys

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

COLUMNS_AND_ROWS = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

KEPT = []


class SumsInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class SumsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SplitBlock(nn.Module):
    def __init__(self, block, group):
        super().__init__()
        self.group, self.size, rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.norm, self.gain, self.down_bias = block.norm, block.gain, block.down.bias
        self.up = nn.Parameter(block.up.weight.detach().chunk(self.size)[rank].clone())
        self.up_bias = nn.Parameter(block.up.bias.detach().chunk(self.size)[rank].clone())
        self.down = nn.Parameter(block.down.weight.detach().chunk(self.size, 1)[rank].clone())

    def forward(self, x):
        inputs, gain = SumsInBackward.apply(self.norm(x), self.group), SumsInBackward.apply(self.gain, self.group)
        hidden = F.gelu(F.linear(inputs, self.up, self.up_bias)) * gain
        return x + SumsInForward.apply(F.linear(hidden, self.down), self.group) + self.down_bias


def split_blocks(net, group=None):
    return nn.Sequential(*(SplitBlock(block, group) for block in net))
"""

LAYERS = (
    COLUMNS_AND_ROWS
    + """

def own(tensor, group, dim):
    return tensor.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()


class Column(nn.Module):
    def __init__(self, linear, group=None):
        super().__init__()
        self.group = group
        self.weight, self.bias = (nn.Parameter(own(each, group, 0)) for each in (linear.weight, linear.bias))

    def forward(self, x):
        return F.linear(SumsInBackward.apply(x, self.group), self.weight, self.bias)


class PaddedColumn(Column):
    def __init__(self, linear, group=None):
        nn.Module.__init__(self)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.group, self.rows = group, -(-linear.out_features // size)
        padding = self.rows * size - linear.out_features
        self.weight = nn.Parameter(own(F.pad(linear.weight, (0, 0, 0, padding)), group, 0))
        self.bias = nn.Parameter(own(F.pad(linear.bias, (0, padding)), group, 0))
        self.used = min(self.rows, linear.out_features - rank * self.rows)

    def forward(self, x):
        return super().forward(x)[:, :self.used]


class Row(nn.Module):
    def __init__(self, linear, group=None):
        super().__init__()
        self.group, self.weight, self.bias = group, nn.Parameter(own(linear.weight, group, 1)), linear.bias

    def forward(self, x):
        partial = own(x, self.group, 1) @ self.weight.T
        return SumsInForward.apply(partial, self.group) + self.bias
"""
)

# Each rank holds every size-th index. The course's ring adds up in forward, and hooks replace autograd functions.
STRIDED = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from solutions.collectives import ring_all_reduce


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.flatten().clone()
        ring_all_reduce(total, group)
        return total.view(partial.shape)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class SplitBlock(nn.Module):
    def __init__(self, block, group):
        super().__init__()
        own = slice(dist.get_rank(group), None, dist.get_world_size(group))
        self.group, self.norm = group, block.norm
        self.gain, self.down_bias = nn.Parameter(block.gain.detach().clone()), nn.Parameter(block.down.bias.data)
        self.up, self.up_bias, self.down = (
            nn.Parameter(tensor.detach()[index].contiguous().clone())
            for tensor, index in ((block.up.weight, own), (block.up.bias, own), (block.down.weight, (slice(None), own)))
        )
        self.gain.register_hook(self.summed)

    def summed(self, gradient):
        total = gradient.clone().view(-1)
        dist.all_reduce(total, group=self.group)
        return total.view(gradient.shape)

    def forward(self, x):
        inputs = self.norm(x) * 1
        inputs.register_hook(self.summed)
        hidden = F.gelu(inputs @ self.up.T + self.up_bias) * self.gain
        return x + self.down_bias + Whole.apply(hidden @ self.down.T, self.group)


def split_blocks(net, group=None):
    return nn.Sequential(*[SplitBlock(each, group) for each in net])
"""

STAGES = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Stages:
    def __init__(self, layers, group=None):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        first, last = (stage * len(layers) // self.size for stage in (self.rank, self.rank + 1))
        self.layers = layers[first:last]

    def stage_parameters(self):
        return self.layers.named_parameters()  # a slice of a Sequential keeps its layers' names

    def step(self, x, y):
        is_last = self.rank == self.size - 1
        x = x.clone()
        if self.rank:
            dist.recv(x, group=self.group, group_src=self.rank - 1)
            x.requires_grad_()
        output, loss = self.layers(x), torch.zeros((), dtype=x.dtype)
        if is_last:
            loss = F.mse_loss(output, y)
            loss.backward()
        else:
            dist.send(output.detach(), group=self.group, group_dst=self.rank + 1)
            gradient = torch.empty_like(output)
            dist.recv(gradient, group=self.group, group_src=self.rank + 1)
            output.backward(gradient)
        if self.rank:
            dist.send(x.grad, group=self.group, group_dst=self.rank - 1)
        loss = loss.detach()
        dist.broadcast(loss, group=self.group, group_src=self.size - 1)
        return loss
"""

COPIES = (
    COLUMNS_AND_ROWS
    + """

class Replicated(nn.Module):
    def __init__(self, net, mesh):
        super().__init__()
        self.module, self.group = split_blocks(net, mesh.get_group("tp")), mesh.get_group("dp")

    def forward(self, x):
        return self.module(x)

    def finish_gradient_sync(self):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= dist.get_world_size(self.group)
"""
)

# For each mistake: the check that must fail, words of its hint or evidence, and the source text to replace.
WRONG_BLOCKS = {
    "forgets the sum in forward": (
        "outputs",
        "the output",
        ("total = x.clone()\n        dist.all_reduce(total, group=group)\n", "total = x.clone()\n"),
    ),
    "forgets the sum in backward": (
        "gradients",
        "Each rank has a part of it",
        ("total = gradient.clone()\n        dist.all_reduce(total, group=ctx.group)\n", "total = gradient.clone()\n"),
    ),
    "leaves a replicated gradient partial": (
        "gradients",
        "Each rank has a part of it",
        ("SumsInBackward.apply(self.gain, self.group)", "self.gain"),
    ),
    "adds up a gradient that is complete": (
        "gradients",
        "exactly 2 times too large",
        ("+ self.down_bias", "+ SumsInBackward.apply(self.down_bias, self.group)"),
    ),
    "averages gradients, as data parallelism does": (
        "gradients",
        "exactly 2 times too small",
        (
            "def split_blocks",
            "class SplitBlock(SplitBlock):\n"
            "    def __init__(self, *arguments):\n"
            "        super().__init__(*arguments)\n"
            "        for p in self.parameters():\n"
            "            p.register_hook(lambda gradient: gradient / self.size)\n\n\ndef split_blocks",
        ),
    ),
    "averages outputs instead of adding them up": (
        "outputs",
        "the output",
        ("        return total\n\n    @staticmethod\n    def backward(ctx, gradient):\n        return gradient, None",
         "        return total / dist.get_world_size(group)\n\n    @staticmethod\n"
         "    def backward(ctx, gradient):\n        return gradient, None"),
    ),
    "adds the bias on every rank": (
        "outputs",
        "the output",
        ("F.linear(hidden, self.down), self.group) + self.down_bias",
         "F.linear(hidden, self.down, self.down_bias), self.group)"),
    ),
    "keeps the whole weight alive behind a view": (
        "memory",
        "after the split",
        ("chunk(self.size)[rank].clone()", "chunk(self.size)[rank]"),
    ),
    "keeps the whole block": (
        "memory",
        "after the split",
        ("        self.up = nn", "        self.whole = [block]\n        self.up = nn"),
    ),
    "keeps what it has summed": (
        "memory",
        "after a step",
        ("        total = x.clone()\n", "        total = x.clone()\n        KEPT.append(total.new_empty(50_000))\n"),
    ),
    "uses the world instead of the group": (
        "group",
        "this rank's group is",
        ("SplitBlock(block, group)", "SplitBlock(block, None)"),
    ),
    "sums over the world, splits over the group": (
        "group",
        "all_reduce among ranks",
        ("dist.all_reduce(total, group=group)", "dist.all_reduce(total)"),
    ),
    "takes the columns of another rank": (
        "layout",
        "which indices of the whole parameter",
        ("chunk(self.size, 1)[rank]", "chunk(self.size, 1)[rank - 1]"),
    ),
    "computes the rows without a graph": (
        "gradients",
        "is None",
        ("hidden = F.gelu(F.linear(inputs, self.up, self.up_bias)) * gain",
         "with torch.no_grad():\n            hidden = F.gelu(F.linear(inputs, self.up, self.up_bias)) * gain"),
    ),
    "evaluates without gradients": (
        "gradients",
        "does not require grad",
        ("    def forward(self, x):\n        inputs",
         "    @torch.no_grad()\n    def forward(self, x):\n        inputs"),
    ),
    "gathers along the wrong dimension": (
        "outputs",
        "the output",
        ("        dist.all_reduce(total, group=group)\n        return total\n",
         "        parts = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]\n"
         "        dist.all_gather(parts, total, group=group)\n"
         "        width = total.shape[1] // len(parts)\n"
         "        return torch.cat([part[:, :width] for part in parts], 1)\n"),
    ),
    "sums in float32": (
        "outputs",
        "not as precise as float64",
        ("total = x.clone()\n", "total = x.float()\n"),
    ),
    "sums once more than needed": (
        "wire",
        "expected 2 all_reduce of 384 bytes",
        ("+ self.down_bias\n", "+ self.down_bias + 0 * SumsInForward.apply(x, self.group)\n"),
    ),
    "gathers whole weights in each forward": (
        "wire",
        "bytes",
        ("        hidden =", "        dist.all_gather([self.up.detach().clone() for _ in range(self.size)],"
         " self.up.detach(), group=self.group)\n        hidden ="),
    ),
    "sends one message per sample": (
        "wire",
        "messages",
        ("        dist.all_reduce(total, group=group)\n        return total\n",
         "        for row in total:\n            dist.all_reduce(row, group=group)\n        return total\n"),
    ),
}  # fmt: skip

WRONG_LAYERS = {
    "returns the output before the sum": (
        "outputs",
        "The ranks' outputs add up to the right one",
        ("return SumsInForward.apply(partial, self.group) + self.bias",
         "return partial + self.bias / dist.get_world_size(self.group)"),
    ),
    "adds the bias before the sum": (
        "outputs",
        "bias is in the output 2 times",
        ("SumsInForward.apply(partial, self.group) + self.bias",
         "SumsInForward.apply(partial + self.bias, self.group)"),
    ),
    "takes the mean": (
        "outputs",
        "exactly 2 times too small",
        ("SumsInForward.apply(partial, self.group) + self.bias",
         "(SumsInForward.apply(partial, self.group) + self.bias) / dist.get_world_size(self.group)"),
    ),
    "puts elements back in another order": (
        "outputs",
        "in another order",
        ("self.group) + self.bias", "self.group).flip(1) + self.bias.flip(0)"),
    ),
    "adds a dimension": (
        "outputs",
        "along which dimension",
        ("self.group) + self.bias", "self.group).unsqueeze(0) + self.bias"),
    ),
}  # fmt: skip

WRONG_STAGES = {
    "does not send gradients back": (
        "gradients",
        "all zeros",
        ("dist.send(x.grad,", "dist.send(torch.zeros_like(x),"),
    ),
    "sends the gradient of a sum": (
        "gradients",
        "the gradient of",
        ("dist.send(x.grad,", "dist.send(x.grad * len(x),"),
    ),
    "lets only the last rank know the loss": (
        "outputs",
        "which ranks know the loss",
        ("        dist.broadcast(loss, group=self.group, group_src=self.size - 1)\n", ""),
    ),
    "keeps all layers": (
        "memory",
        "after the split",
        ("        first, last", "        self.all_layers = layers\n        first, last"),
    ),
    "leaves out a layer": (
        "layout",
        "no rank holds",
        ("layers[first:last]", "layers[first:last - (self.rank == 1)]"),
    ),
    "broadcasts in the world": (
        "group",
        "broadcast among ranks",
        ("dist.broadcast(loss, group=self.group, group_src=self.size - 1)",
         "dist.broadcast(loss, src=dist.get_world_size() - 1)"),
    ),
    "sends activations to everybody": (
        "wire",
        "broadcast",
        ("        loss = loss.detach()\n",
         "        loss = loss.detach()\n"
         "        dist.broadcast(output.detach().clone(), group=self.group, group_src=0)\n"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def four_fresh_ranks():
    ranks.start(world_size=4, detect_mismatch=False)
    yield
    ranks.stop()


def verdicts_on(exercise, source: str, folder, only: str = "") -> list:
    path = folder / "candidate.py"
    path.write_text(source)
    return run_exercise(exercise, str(path), only=only)


@pytest.mark.parametrize(
    ("exercise", "source"),
    [
        (toys.split_blocks, COLUMNS_AND_ROWS),
        (toys.split_strided, STRIDED),
        (toys.Column, LAYERS),
        (toys.Row, LAYERS),
        (toys.PaddedColumn, LAYERS),
        (toys.Stages, STAGES),
        (toys.copies, COPIES),
    ],
    ids=["columns and rows", "strided", "column", "row", "padded", "stages", "copies"],
)
def test_a_right_split_passes(exercise, source, tmp_path):
    failed = [verdict for verdict in verdicts_on(exercise, source, tmp_path) if not verdict.passed]
    assert not failed, "\n".join(f"{each.check}: {each.evidence} {each.hint}" for each in failed)


def judged(exercise, source: str, wrong: tuple, folder):
    check, words, (old, new) = wrong
    assert source.count(old), f"the source has no {old!r}"
    (verdict,) = verdicts_on(exercise, source.replace(old, new), folder, check)
    assert not verdict.passed
    assert "cannot be compared" not in verdict.evidence, "the check itself raised an error"
    output = f"{verdict.evidence}\n{verdict.hint}"
    assert words in output, output


@pytest.mark.parametrize("wrong", WRONG_BLOCKS.values(), ids=WRONG_BLOCKS)
def test_a_wrong_split_of_blocks_fails(wrong, tmp_path):
    judged(toys.split_blocks, COLUMNS_AND_ROWS, wrong, tmp_path)


@pytest.mark.parametrize("wrong", WRONG_LAYERS.values(), ids=WRONG_LAYERS)
def test_a_wrong_layer_fails(wrong, tmp_path):
    judged(toys.Row, LAYERS, wrong, tmp_path)


def test_inputs_whose_gradients_are_not_added_up_fail(tmp_path):
    wrong = ("gradients", "Each rank has a part of it", ("F.linear(SumsInBackward.apply(x, self.group)", "F.linear(x"))
    judged(toys.Column, LAYERS, wrong, tmp_path)


@pytest.mark.parametrize("wrong", WRONG_STAGES.values(), ids=WRONG_STAGES)
def test_a_wrong_pipeline_fails(wrong, tmp_path):
    judged(toys.Stages, STAGES, wrong, tmp_path)


def test_copies_that_do_not_average_fail(tmp_path):
    wrong = ("training", "the gradient of", ("parameter.grad /= dist.get_world_size(self.group)", "pass"))
    judged(toys.copies, COPIES, wrong, tmp_path)


SCALES_BY_ITS_OWN_NORM = """
import torch
from torch import nn

from shared.guards import calls
from shared.sharded import parts

parameter = nn.Parameter(torch.ones(2))
parameter.grad = torch.ones(2)
for guard in GUARDS:
    guard()
parts.mark([parameter], instead_of_clipping="refused")
nn.utils.clip_grads_with_norm_([parameter], 1.0, torch.tensor(2.0))
try:
    nn.utils.clip_grad_norm_([parameter], 1.0)
except RuntimeError as error:
    print([round(each, 3) for each in parameter.grad.tolist()], error)
"""


@pytest.mark.parametrize("guards", ["parts._guard_torch, calls.guard_torch", "calls.guard_torch, parts._guard_torch"])
def test_gradients_can_be_scaled_by_a_norm_of_the_whole_model_whichever_guard_is_first(guards):
    text = SCALES_BY_ITS_OWN_NORM.replace("GUARDS", f"({guards})")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=scaled(60))
    assert "[0.5, 0.5]" in done.stdout and "refused" in done.stdout, done.stderr
