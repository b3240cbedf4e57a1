"""The messages of the checks of four chapters name the mistake, or point at a more basic check that fails, too."""

import re
from pathlib import Path

import pytest

from shared import ranks
from shared.checks.__main__ import run_file
from shared.checks.gspmd.cases import describe_bytes
from tests import mutants

pytestmark = pytest.mark.slow

MEMORY_WALL, ZERO1, ZERO3, GSPMD = (
    pytest.mark.chapter(chapter) for chapter in ("memory_wall", "zero1", "zero3", "gspmd")
)


@pytest.fixture(scope="module", autouse=True)
def four_ranks():
    ranks.start(world_size=4, detect_mismatch=False)
    yield
    ranks.stop()


def verdict_on(module: str, path: Path, piece: str, check: str, text: str = ""):
    """Run a check that must fail, on a file, or on a text that is written into a folder."""
    if text:
        path = path / "candidate.py"
        path.write_text(text)
    (verdict,) = run_file(module, path, only=piece, check=check)
    assert not verdict.passed
    return verdict


# -- chapter 06

COUNT = """
import torch


def model_state_bytes(module, optimizer):
    return {
        "parameters": sum(p.nbytes for p in module.parameters()),
        "gradients": sum(p.grad.nbytes for p in module.parameters() if p.grad is not None),
        "optimizer": sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    }
"""


@MEMORY_WALL
@pytest.mark.parametrize(
    ("forgotten", "context", "hint"),
    [
        (" if p.grad is not None", "before the first step", "no gradient"),
        (" if torch.is_tensor(v)", "plain numbers", "not tensors"),
    ],
)
def test_an_error_of_the_count_names_the_model_and_gets_a_hint(tmp_path, forgotten, context, hint):
    verdict = verdict_on("memory_wall", tmp_path, "model_state_bytes", "values", COUNT.replace(forgotten, ""))
    assert context in verdict.evidence and "AttributeError" in verdict.evidence and hint in verdict.hint


DEFAULTS = """
import torch

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, {**self.defaults, "params": [parameter]})
"""


@MEMORY_WALL
@pytest.mark.parametrize("check", ["small updates", "schedulers", "inside another"])
def test_settings_of_the_wrong_group_are_looked_for_in_groups(tmp_path, check):
    assert "“groups” fails, too" in verdict_on("memory_wall", tmp_path, "MasterWeights", check, DEFAULTS).hint


HOLDER = """
from solutions import memory_wall as right


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        state = self.state[parameter]
        if "master" not in state:
            state["master"] = parameter.detach().float()
        master, inner_state = state["master"], STATE
        master.grad = parameter.grad.float()
        self.step_inner(master, inner_state, group)
        state.update(inner_state)
        parameter.copy_(master)
        master.grad = None
"""


@MEMORY_WALL
@pytest.mark.parametrize(("check", "inner_state"), [("one gradient", "{}"), ("memory", "state")])
def test_a_wrong_state_of_the_inner_optimizer_is_looked_for_in_plain(tmp_path, check, inner_state):
    text = HOLDER.replace("STATE", inner_state)
    assert "“plain” fails, too" in verdict_on("memory_wall", tmp_path, "HoldsMasters", check, text).hint


FROZEN_ONLY = """
import torch

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.step_one(parameter, group)
        return loss
"""


@MEMORY_WALL
def test_a_step_that_does_not_look_at_grad_is_asked_about_missing_gradients(tmp_path):
    verdict = verdict_on("memory_wall", tmp_path, "MasterWeights", "no gradient", FROZEN_ONLY)
    assert "'NoneType' object has no attribute 'float'" in verdict.evidence and "have a gradient" in verdict.hint


RECOMPUTE = """
import torch

from solutions import memory_wall as right


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, num_inputs, *tensors):
        ctx.module, ctx.num_inputs = module, num_inputs
        ctx.save_for_backward(*tensors)
        output = module(*tensors[:num_inputs])
        ctx.states = right.get_rng_states()  # too late
        return output

    @staticmethod
    def backward(ctx, gradient):
        inputs = [saved.detach().requires_grad_(saved.requires_grad) for saved in ctx.saved_tensors[: ctx.num_inputs]]
        tensors = [*inputs, *ctx.saved_tensors[ctx.num_inputs :]]
        with torch.enable_grad(), right.restored(ctx.states):
            output = ctx.module(*inputs)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        remaining = iter(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        return None, None, *(next(remaining) if tensor.requires_grad else None for tensor in tensors)


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
"""


@MEMORY_WALL
def test_random_states_of_the_wrong_moment_are_looked_for_in_dropout(tmp_path):
    assert "“dropout” fails, too" in verdict_on("memory_wall", tmp_path, "Checkpointed", "order", RECOMPUTE).hint


@MEMORY_WALL
@pytest.mark.parametrize("check", ["twice", "dropout", "memory"])
def test_a_graph_that_is_not_recorded_is_looked_for_in_values(tmp_path, check):
    text = RECOMPUTE.replace("torch.enable_grad(), ", "")
    assert "“values” fails, too" in verdict_on("memory_wall", tmp_path, "Checkpointed", check, text).hint


@MEMORY_WALL
def test_a_sum_without_the_incoming_gradient_is_hinted_at(tmp_path):
    for without in ("grad(output.sum(), wanted,", "grad(output, wanted,"):
        text = RECOMPUTE.replace("grad(output, wanted, gradient,", without)
        assert (
            "gradient that backward() receives"
            in verdict_on("memory_wall", tmp_path, "Checkpointed", "values", text).hint
        )


@MEMORY_WALL
def test_saved_copies_are_hinted_at(tmp_path):
    text = RECOMPUTE.replace("save_for_backward(*tensors)", "save_for_backward(*[each.clone() for each in tensors])")
    assert "a copy" in verdict_on("memory_wall", tmp_path, "Checkpointed", "values", text).hint


# -- chapter 07

OWNERS = "is this element in the rank's own shard"


@ZERO1
@pytest.mark.parametrize(
    ("mutant", "piece", "check", "hint"),
    [
        ("flat_copies_parameters", "FlatParameter", "all-gather", "whose memory does each parameter use"),
        ("flat_copies_parameters", "FlatParameter", "memory", "whose memory does each parameter use"),
        ("flat_shard_is_a_copy", "FlatParameter", "memory", "whose memory does `shard` use"),
        ("sharded_gathers_nothing", "ShardedOptimizer", "plain", OWNERS),
        # Where the norm of a flat tensor is below max_norm, this mutant does not scale it at all.
        ("clips_each_flat_tensor", "ZeRO1", "clipping", "by which factor|which tensors are scaled"),
        ("clips_without_epsilon", "ZeRO1", "skipped step", "by which factor"),
    ],
)
def test_a_mistake_with_shards_gets_its_own_hint(tmp_path, mutant, piece, check, hint):
    assert re.search(hint, verdict_on("zero1", tmp_path, piece, check, mutants.named("07_zero1", mutant).code()).hint)


COPY = """
from torch import nn

from solutions import flat as right


class FlatParameter(right.FlatParameter):
    def __init__(self, parameters, group=None):
        self.layout = right.FlatLayout(parameters, group)
        self.flat_param = self.layout.new_flat()
        COPY
        self.shard = nn.Parameter(self.layout.shard_of(self.flat_param))
        self._alias_parameters()
"""


@ZERO1
@pytest.mark.parametrize(
    ("copy", "check"),
    [
        ("[view.copy_(p) for view, p in zip(self.layout.views(self.flat_param), parameters)]", "layout"),
        ("self.flat_param[: self.layout.numel] = right.torch.cat([p.flatten() for p in parameters])", "views"),
    ],
)
def test_a_copy_that_autograd_records_is_hinted_at(tmp_path, copy, check):
    assert (
        "should autograd record"
        in verdict_on("zero1", tmp_path, "FlatParameter", check, COPY.replace("COPY", copy)).hint
    )


@ZERO1
def test_a_changed_param_group_is_named_before_the_wrong_values(tmp_path):
    text = """
from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.param_groups[-1]["params"] = self.inner.param_groups[-1]["params"]
"""
    verdict = verdict_on("zero1", tmp_path, "ShardedOptimizer", "plain", text)
    assert "in param_groups were replaced" in verdict.evidence and "uses the same dict" in verdict.hint


@ZERO1
def test_settings_that_are_never_copied_are_looked_for_in_settings(tmp_path):
    text = """
from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def update_parameters(self):
        self.inner.step()
        for work in [flat_parameter.launch_all_gather() for flat_parameter in self.flat_parameters]:
            work.wait()
        self.zero_grad()
"""
    assert "“settings” fails, too" in verdict_on("zero1", tmp_path, "ShardedOptimizer", "more parameters", text).hint


@ZERO1
def test_a_missing_all_gather_gets_the_same_hint_in_the_next_exercise(tmp_path):
    text = """
from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def update_parameters(self):
        self.inner.step()
"""
    assert OWNERS in verdict_on("zero1", tmp_path, "ZeRO1", "values", text).hint


# -- chapter 09

PREFETCHER = """
from solutions import prefetching as right


class Prefetcher(right.Prefetcher):
"""
IN_FORWARD = """
    def in_forward(self, unit):
        self.called.append(unit)
        self._unshard(self.expected[self.expected.index(unit) + 1 :])
"""
IN_BACKWARD = """
    def in_backward(self, unit, unreached=()):
        order = self.called[::-1]
        self._unshard([each for each in order[order.index(unit) + 1 :] if each not in unreached])
"""


@ZERO3
@pytest.mark.parametrize(
    ("method", "check", "hint"),
    [
        (IN_FORWARD, "plain order", "In the first forward, `expected` is empty. Hint: when is the unit in it?"),
        (IN_FORWARD, "backward", "In the first forward, `expected` is empty. Hint: when is the unit in it?"),
        (IN_BACKWARD, "backward", "Hint: what should in_backward() do for a unit that is not in `called`?"),
    ],
    ids=["forward", "forward before backward", "backward"],
)
def test_a_unit_that_is_not_in_a_list_is_hinted_at_by_method(tmp_path, method, check, hint):
    path = tmp_path / "candidate.py"
    path.write_text(PREFETCHER + method)
    assert verdict_on("units", path, "Prefetcher", check).hint == hint


@ZERO3
def test_a_forgotten_group_is_hinted_at(tmp_path):
    path = mutants.named("09_zero3", "shards_forget_the_group").write(tmp_path)
    verdict = verdict_on("units", path, "ShardedFlatParameter", "unshard")
    assert "invalid for input of size" in verdict.evidence and "which group does the all-gather use?" in verdict.hint


@ZERO3
def test_handles_that_are_kept_are_counted(tmp_path):
    path = mutants.named("09_zero3", "unit_keeps_its_handles").write(tmp_path)
    verdict = verdict_on("units", path, "Unit", "a plain forward")
    assert "wait_for_unshard(): all all-gathers are complete, but self.works holds" in verdict.evidence


@ZERO3
def test_a_hook_without_the_gradient_is_named(tmp_path):
    path = mutants.named("09_zero3", "plain_drops_the_gradient").write(tmp_path)
    verdict = verdict_on("units", path, "PlainZeRO3", "backward hooks")
    assert "calls pre_backward() without the gradient" in verdict.evidence


# -- chapter 17


@GSPMD
@pytest.mark.parametrize(
    ("mutant", "piece", "check", "hint"),
    [
        ("shard_rules_without_dim_0", "shard_rules", "matrix product", "in which dimension? (0 is a dimension, too.)"),
        ("shard_rules_sum_is_replicated", "shard_rules", "matrix product", "what does its result contain"),
        ("shard_rules_in_reverse", "shard_rules", "matrix product", "in which order"),
        ("plan_takes_the_last_of_equals", "propagate", "equal plans", "which of the equal plans do you take"),
        ("redistribute_returns_nothing", "redistribute", "plain changes", "in place return"),
        ("parts_added_in_place", "local_part", "more ranks", "writes to one of `parts`"),
    ],
)
def test_a_mistake_with_placements_gets_its_own_hint(tmp_path, mutant, piece, check, hint):
    assert hint in verdict_on("gspmd", mutants.named("17_gspmd", mutant).write(tmp_path), piece, check).hint


@GSPMD
def test_a_piece_that_returns_nothing_is_named(tmp_path):
    path = mutants.named("17_gspmd", "redistribute_returns_nothing").write(tmp_path)
    verdict = verdict_on("gspmd", path, "redistribute", "plain changes")
    assert "redistribute returned None, expected a tensor" in verdict.evidence


@GSPMD
def test_shards_of_a_given_length_are_told_from_a_number_of_shards(tmp_path):
    path, right = tmp_path / "candidate.py", mutants.named("17_gspmd", "parts_replicated_is_summed").code()
    path.write_text(right.replace("tensor.chunk(", "tensor.split("))
    assert "the number of shards, or their length?" in verdict_on("gspmd", path, "local_part", "two ranks").hint


@GSPMD
def test_unequal_bytes_do_not_look_equal():
    assert describe_bytes(11_931_947, 11_931_946.67) == ["11,931,947.0", "11,931,946.7"]
    assert describe_bytes(1024, 2048.0) == ["1,024", "2,048"]
