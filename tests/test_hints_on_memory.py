"""The messages of chapter 06's checks name the mistake, and point at a more basic check that fails, too."""

import pytest

from shared import ranks
from shared.checks.__main__ import run_file

pytestmark = [pytest.mark.slow, pytest.mark.chapter("memory_wall")]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    ranks.start(world_size=1, detect_mismatch=False)
    yield
    ranks.stop()


def verdict_on(tmp_path, piece: str, check: str, text: str):
    path = tmp_path / "candidate.py"
    path.write_text(text)
    (verdict,) = run_file("memory_wall", path, only=piece, check=check)
    assert not verdict.passed
    return verdict


COUNT = """
import torch


def model_state_bytes(module, optimizer):
    return {
        "parameters": sum(p.nbytes for p in module.parameters()),
        "gradients": sum(p.grad.nbytes for p in module.parameters() if p.grad is not None),
        "optimizer": sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    }
"""


@pytest.mark.parametrize(
    ("forgotten", "context", "hint"),
    [
        (" if p.grad is not None", "before the first step", "no gradient"),
        (" if torch.is_tensor(v)", "plain numbers", "not tensors"),
    ],
)
def test_an_error_of_the_count_names_the_model_and_gets_a_hint(tmp_path, forgotten, context, hint):
    verdict = verdict_on(tmp_path, "model_state_bytes", "values", COUNT.replace(forgotten, ""))
    assert context in verdict.evidence and "AttributeError" in verdict.evidence and hint in verdict.hint


DEFAULTS = """
import torch

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, {**self.defaults, "params": [parameter]})
"""


@pytest.mark.parametrize("check", ["small updates", "schedulers", "inside another"])
def test_settings_of_the_wrong_group_are_looked_for_in_groups(tmp_path, check):
    assert "“groups” fails, too" in verdict_on(tmp_path, "MasterWeights", check, DEFAULTS).hint


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


@pytest.mark.parametrize(("check", "inner_state"), [("one gradient", "{}"), ("memory", "state")])
def test_a_wrong_state_of_the_inner_optimizer_is_looked_for_in_plain(tmp_path, check, inner_state):
    text = HOLDER.replace("STATE", inner_state)
    assert "“plain” fails, too" in verdict_on(tmp_path, "HoldsMasters", check, text).hint


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


def test_a_step_that_does_not_look_at_grad_is_asked_about_missing_gradients(tmp_path):
    verdict = verdict_on(tmp_path, "MasterWeights", "no gradient", FROZEN_ONLY)
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


def test_random_states_of_the_wrong_moment_are_looked_for_in_dropout(tmp_path):
    assert "“dropout” fails, too" in verdict_on(tmp_path, "Checkpointed", "order", RECOMPUTE).hint


@pytest.mark.parametrize("check", ["twice", "dropout", "memory"])
def test_a_graph_that_is_not_recorded_is_looked_for_in_values(tmp_path, check):
    text = RECOMPUTE.replace("torch.enable_grad(), ", "")
    assert "“values” fails, too" in verdict_on(tmp_path, "Checkpointed", check, text).hint


def test_a_sum_without_the_incoming_gradient_is_hinted_at(tmp_path):
    for without in ("grad(output.sum(), wanted,", "grad(output, wanted,"):
        text = RECOMPUTE.replace("grad(output, wanted, gradient,", without)
        assert "gradient that backward() receives" in verdict_on(tmp_path, "Checkpointed", "values", text).hint


def test_saved_copies_are_hinted_at(tmp_path):
    text = RECOMPUTE.replace("save_for_backward(*tensors)", "save_for_backward(*[each.clone() for each in tensors])")
    assert "a copy" in verdict_on(tmp_path, "Checkpointed", "values", text).hint
