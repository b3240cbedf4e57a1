"""The messages of the checks point at the mistake, or at a more basic check that fails, too."""

from pathlib import Path

import pytest

from instructor.build import chapters, module_names
from shared import ranks
from shared.checks.__main__ import run_file
from shared.checks.engine.display import as_text
from shared.checks.gspmd.cases import describe_bytes
from tests import mutants

pytestmark = pytest.mark.slow

OVERLAP, SCALING, MEMORY_WALL, ZERO1, ZERO3, PRODUCTION, GSPMD = (
    pytest.mark.chapter(name) for name in ("overlap", "scaling", "memory_wall", "zero1", "zero3", "production", "gspmd")
)


@pytest.fixture(scope="module", autouse=True)
def four_ranks():
    ranks.start(world_size=4, detect_mismatch=False)
    yield
    ranks.stop()


def verdict_on(folder: Path, module: str, piece: str, check: str, text: str, seed: int | None = None):
    """Run a check that must fail on a text. Returns its verdict."""
    path = folder / "candidate.py"
    path.write_text(text)
    (verdict,) = run_file(module, path, seed, only=piece, check=check)
    assert not verdict.passed
    return verdict


# -- mutants. For each: the check, unless it is the one that must catch it, and what its evidence and its hint say.

OWNERS = "is this element in the rank's own shard"
SAID_OF = {
    "04_overlap": [
        ("queue_never_begins_anew", "", "must be reset"),
    ],
    "05_scaling": [
        ("tokens_all_in_one_bucket", "", "how often do you pay the latency"),
        ("tokens_in_bf16", "", "how large a gradient is"),
        ("tokens_of_whole_steps", "", "How many operations does backward take"),
        ("tokens_without_latency", "", "right without latency"),
        ("tokens_of_the_lesson", "", "the lesson's C/W"),
        ("tokens_on_the_ranks_that_run", "", "which variable tells your function"),
        ("micro_rounded_down", "", "do you round up or down"),
        ("micro_none", "", "how many micro-batches does a step have at least"),
        ("cost_difference_of_medians", "", "from which rounds may the two medians come"),
        ("efficiency_ignores_the_cap", "", "how many all-reduces does your step have"),
        ("cost_never_negative", "", "if the steps with communication are the faster"),
        ("cost_exposed_first", "", "in which order do you return them"),
        ("cost_drops_the_last_round", "", "which round is only a warm-up"),
        ("cost_computes_with_communication", "", "which kind of step is compute_ms"),
        ("efficiency_on_the_ranks_that_run", "", "which variable tells your function"),
        ("cost_clears_gradients_at_the_end", "", "begins with gradients that the model had before the call"),
        ("cost_onto_old_gradients", "", "measurement 1 begins with gradients"),
        ("cost_with_communication_first", "", "runs outside no_sync(); expected inside and outside in turn"),
        ("cost_of_two_halves", "", "measurement 2 runs inside no_sync(), like measurement 1"),
        ("cost_with_forward_outside_no_sync", "", "runs forward outside no_sync(), but backward and finish"),
        ("cost_finishes_outside_no_sync", "", "runs finish_gradient_sync() outside no_sync(), but forward"),
        ("cost_without_finish_in_no_sync", "", "forward 22, backward 22, finish_gradient_sync() 11; expected 22"),
        ("cost_by_its_own_clock", "measuring", "the last call before forward is dist.barrier()"),
    ],
    "07_zero1": [
        # One of several is enough where they are separated by |.
        ("flat_copies_parameters", "all-gather", "whose memory does each parameter use"),
        ("flat_copies_parameters", "memory", "whose memory does each parameter use"),
        ("flat_shard_is_a_copy", "memory", "whose memory does `shard` use"),
        ("sharded_gathers_nothing", "", OWNERS),
        # Where the norm of a flat tensor is below max_norm, this mutant does not scale it at all.
        ("clips_each_flat_tensor", "", "by which factor|which tensors are scaled"),
        ("clips_without_epsilon", "skipped step", "by which factor"),
    ],
    "09_zero3": [
        ("shards_forget_the_group", "", "invalid for input of size", "which group does the all-gather use?"),
        ("unit_keeps_its_handles", "a plain forward", "all all-gathers are complete, but self.works holds"),
        ("plain_drops_the_gradient", "", "calls pre_backward() without the gradient"),
    ],
    "11_production": [
        ("trains_frozen_parameters", "", "is a tensor; expected None", "require gradients"),
    ],
    "17_gspmd": [
        ("shard_rules_without_dim_0", "", "in which dimension? (0 is a dimension, too.)"),
        ("shard_rules_sum_is_replicated", "", "what does its result contain"),
        ("shard_rules_in_reverse", "", "in which order"),
        ("plan_takes_the_last_of_equals", "", "which of the equal plans do you take"),
        ("redistribute_returns_nothing", "", "in place return", "redistribute returned None, expected a tensor"),
        ("parts_added_in_place", "", "writes to one of `parts`"),
    ],
}
MODULES = {chapter.name: module_names(chapter)[0] for chapter in chapters()}


@pytest.mark.parametrize(
    ("chapter", "name", "check", "texts"),
    [
        pytest.param(chapter, name, check, texts, id=f"{chapter}-{name}{check and f', {check}'}")
        for chapter, rows in SAID_OF.items()
        for name, check, *texts in rows
    ],
)
def test_a_check_says_what_is_wrong_with_a_mutant(tmp_path, chapter, name, check, texts):
    mutant = mutants.named(chapter, name)
    verdict = verdict_on(tmp_path, MODULES[chapter], mutant.exercise, check or mutant.check, mutant.code())
    for words in texts:
        assert any(each in f"{verdict.evidence} {verdict.hint}" for each in words.split("|")), verdict


# -- chapter 00


@pytest.mark.parametrize("line", ["dist.send(tensor, dst=dst)", "dist.isend(tensor, dst=dst).wait()"])
def test_a_send_to_oneself_is_hinted_at(tmp_path, line):
    text = f"""
import torch.distributed as dist


def broadcast_by_hand(tensor, src):
    if dist.get_rank() != src:
        dist.recv(tensor, src=src)
        return
    for dst in range(dist.get_world_size()):
        {line}
"""
    verdict = verdict_on(tmp_path, "first_collectives", "broadcast_by_hand", "values", text)
    assert "Invalid destination rank" in verdict.evidence and "not run?" in verdict.hint


# -- chapter 04

QUEUE = """
class LaunchQueue:
    def __init__(self, buckets):
        self.buckets = buckets
        self.begin()

    def begin(self):
        self.missing = [set(range(len(bucket.parameters))) for bucket in self.buckets]
        self.launched = 0

    def add(self, bucket_index, index):
        self.missing[bucket_index].remove(index)
        self.buckets[bucket_index].pack(index)
        while self.launched < len(self.buckets) and not self.missing[self.launched]:
            self.buckets[self.launched].launch()
            self.launched += 1

    def finish(self):
        for bucket_index, indices in enumerate(self.missing):
            for index in sorted(indices):
                self.add(bucket_index, index)
        for bucket in self.buckets:
            bucket.wait()
        self.begin()
"""


@OVERLAP
def test_an_error_after_a_missing_reset_names_the_round(tmp_path):
    text = QUEUE.replace("            bucket.wait()\n        self.begin()", "            bucket.wait()")
    evidence = verdict_on(tmp_path, "overlapped_ddp", "LaunchQueue", "order", text).evidence
    assert "KeyError" in evidence and ") in round 2; finish() had ended round 1 without an error.)" in evidence


@OVERLAP
def test_a_mistake_that_shows_in_a_later_round_is_not_taken_for_a_missing_reset(tmp_path):
    text = QUEUE.replace("        while self.launched", "        if self.launched")
    for seed in range(6):  # the first round in which the mistake shows depends on the seed
        hint = verdict_on(tmp_path, "overlapped_ddp", "LaunchQueue", "order", text, seed).hint
        assert hint == "Hint: which other bucket can be launched, now that this one has been?"


@OVERLAP
def test_a_queue_that_launches_nothing_is_not_asked_about_another_bucket(tmp_path):
    text = QUEUE.replace("        while self.launched", "        while False and self.launched")
    assert "is full" in verdict_on(tmp_path, "overlapped_ddp", "LaunchQueue", "order", text).hint


@OVERLAP
def test_a_wait_during_backward_is_hinted_at_and_shown_alone(tmp_path):
    text = """
from solutions import overlapped_ddp as right


class GradientSync(right.GradientSync):
    def on_gradient(self, bucket_index, index):
        super().on_gradient(bucket_index, index)
        if not any(self.queue.missing):
            self.queue.finish()
"""
    verdict = verdict_on(tmp_path, "overlapped_ddp", "GradientSync", "backward", text)
    assert "what waits here" in verdict.hint and verdict.evidence.count(" was ready: backward() did pack ") == 1


@OVERLAP
def test_a_rank_without_a_backward_that_launches_nothing_is_asked_about_the_other_ranks(tmp_path):
    text = """
from solutions import overlapped_ddp as right


class GradientSync(right.GradientSync):
    def finish(self):
        if self.pending:
            super().finish()
"""
    verdict = verdict_on(tmp_path, "overlapped_ddp", "GradientSync", "no backward", text)
    assert "finish() did nothing" in verdict.evidence and "another rank" in verdict.hint


@OVERLAP
def test_a_backward_that_nobody_finishes_is_asked_about_its_end(tmp_path):
    text = """
from solutions import overlapped_ddp as right


class GradientSync(right.GradientSync):
    def on_gradient(self, bucket_index, index):
        self.pending = True
        if self.enabled:
            self.queue.add(bucket_index, index)
"""
    verdict = verdict_on(tmp_path, "overlapped_ddp", "GradientSync", "backward", text)
    assert "nothing happened when backward() ended" in verdict.evidence and "at_end_of_backward" in verdict.hint


@OVERLAP
def test_a_block_that_restores_nothing_is_hinted_at(tmp_path):
    text = """
import contextlib
from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        self.sync.enabled = False
        yield
"""
    hint = verdict_on(tmp_path, "overlapped_ddp", "OverlappedDDP", "no communication", text).hint
    assert "which line changes it back" in hint


# -- chapter 05


@SCALING
def test_an_error_of_the_cost_model_names_the_arguments(tmp_path):
    text = """
def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    if kind == "strong":
        share = 1 / ranks
    return share
"""
    evidence = verdict_on(tmp_path, "scaling", "efficiency", "weak", text).evidence
    assert "UnboundLocalError" in evidence and "(Your function was called with gradients=[(0." in evidence
    assert "cap_bytes=" in evidence


@SCALING
@pytest.mark.parametrize(
    ("mutant", "piece", "check", "hint", "seed"),
    [
        ("cost_drops_the_last_round", "communication_cost", "values", "which round is only a warm-up", 102_947),
        ("efficiency_ignores_the_cap", "efficiency", "weak", "how many all-reduces does your step have", 126_704),
    ],
)
def test_a_result_that_other_mistakes_explain_too_gets_the_right_hint(tmp_path, mutant, piece, check, hint, seed):
    """With these seeds, another mistake gives the first wrong result, too, or its error is unusually large."""
    text = mutants.named("05_scaling", mutant).code()
    assert hint in verdict_on(tmp_path, "scaling", piece, check, text, seed).hint


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
    verdict = verdict_on(tmp_path, "memory_wall", "model_state_bytes", "values", COUNT.replace(forgotten, ""))
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
    assert "“groups” fails, too" in verdict_on(tmp_path, "memory_wall", "MasterWeights", check, DEFAULTS).hint


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
    assert "“plain” fails, too" in verdict_on(tmp_path, "memory_wall", "HoldsMasters", check, text).hint


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
    verdict = verdict_on(tmp_path, "memory_wall", "MasterWeights", "no gradient", FROZEN_ONLY)
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
    assert "“dropout” fails, too" in verdict_on(tmp_path, "memory_wall", "Checkpointed", "order", RECOMPUTE).hint


@MEMORY_WALL
@pytest.mark.parametrize("check", ["twice", "dropout", "memory"])
def test_a_graph_that_is_not_recorded_is_looked_for_in_values(tmp_path, check):
    text = RECOMPUTE.replace("torch.enable_grad(), ", "")
    assert "“values” fails, too" in verdict_on(tmp_path, "memory_wall", "Checkpointed", check, text).hint


@MEMORY_WALL
def test_a_sum_without_the_incoming_gradient_is_hinted_at(tmp_path):
    for without in ("grad(output.sum(), wanted,", "grad(output, wanted,"):
        text = RECOMPUTE.replace("grad(output, wanted, gradient,", without)
        assert (
            "gradient that backward() receives"
            in verdict_on(tmp_path, "memory_wall", "Checkpointed", "values", text).hint
        )


@MEMORY_WALL
def test_saved_copies_are_hinted_at(tmp_path):
    text = RECOMPUTE.replace("save_for_backward(*tensors)", "save_for_backward(*[each.clone() for each in tensors])")
    assert "a copy" in verdict_on(tmp_path, "memory_wall", "Checkpointed", "values", text).hint


# -- chapter 07


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
        in verdict_on(tmp_path, "zero1", "FlatParameter", check, COPY.replace("COPY", copy)).hint
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
    verdict = verdict_on(tmp_path, "zero1", "ShardedOptimizer", "plain", text)
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
    assert "“settings” fails, too" in verdict_on(tmp_path, "zero1", "ShardedOptimizer", "more parameters", text).hint


@ZERO1
def test_a_missing_all_gather_gets_the_same_hint_in_the_next_exercise(tmp_path):
    text = """
from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def update_parameters(self):
        self.inner.step()
"""
    assert OWNERS in verdict_on(tmp_path, "zero1", "ZeRO1", "values", text).hint


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
    assert verdict_on(tmp_path, "units", "Prefetcher", check, PREFETCHER + method).hint == hint


# -- chapter 11


def a_right_choice() -> str:
    text = mutants.named("11_production", "choice_of_the_smallest").code()
    return text.replace("key=lambda each: each[1]", "key=lambda each: each[0].step_s")


@pytest.mark.parametrize(
    ("old", "new", "evidence", "hint"),
    [
        ("0.9 * ", "1 / 1.1 * ", "which needs 90.0", "may be used"),
        (
            "return best[0]",
            "return best[0] if len(fitting) > 1 else None",
            "chose None; expected",
            "do you try this one",
        ),
        ('("selective", "full")', '("none", "selective", "full")', "not one of the", "kinds of checkpointing do"),
    ],
)
@PRODUCTION
def test_the_evidence_says_what_is_wrong_with_a_choice(tmp_path, old, new, evidence, hint):
    text = a_right_choice()
    verdict = verdict_on(tmp_path, "production", "choose_strategy", "what fits", text.replace(old, new), seed=1)
    assert evidence in verdict.evidence and hint in verdict.hint


@pytest.mark.parametrize(
    ("line", "check", "hint"),
    [
        ("    chosen = set(units or default_units(module))\n", "wire", "An empty list is not None"),
        ("    list(units)\n    chosen = set(units)\n", "nested", "An iterator can be read only once"),
    ],
)
@PRODUCTION
def test_units_that_are_not_sharded_are_explained(tmp_path, line, check, hint):
    text = mutants.named("11_production", "units_or_the_default").code()
    text = text.replace("    chosen = set(units or default_units(module))\n", line)
    assert hint in verdict_on(tmp_path, "production", "fully_sharded", check, text).hint


@pytest.mark.parametrize(
    ("old", "new", "check", "evidence", "hint"),
    [
        ("min(fitting,", "min(fitting[:1],", "what is fast", "which takes", "the first or the fastest"),
        ("micro_batch=micro_batch, ", "", "micro-batch", "at most 90% may be used", "micro-batch"),
        (
            "micro_batch=micro_batch, **how)\n                if",
            "**how)\n                if",
            "micro-batch",
            "",
            "micro-batch",
        ),
    ],
)
@PRODUCTION
def test_the_hint_on_a_choice_fits_the_mistake(tmp_path, old, new, check, evidence, hint):
    text = a_right_choice()
    assert old in text
    for seed in (1, 2, 3):
        verdict = verdict_on(tmp_path, "production", "choose_strategy", check, text.replace(old, new), seed)
        assert evidence in verdict.evidence and hint in verdict.hint


@PRODUCTION
def test_an_error_without_a_message_is_named(tmp_path):
    text = """
from solutions import production as right


def host_mesh(ranks_per_host):
    if right.dist.get_world_size() % ranks_per_host:
        raise ValueError
    return right.host_mesh(ranks_per_host)
"""
    verdict = verdict_on(tmp_path, "production", "host_mesh", "rejection", text)
    assert "a ValueError without a message" in verdict.evidence and "which numbers" in verdict.hint


@PRODUCTION
def test_an_error_that_one_line_raises_in_several_checks_is_displayed_once(tmp_path):
    path = tmp_path / "candidate.py"
    path.write_text("""
from solutions import production as right


def fully_sharded(module, *args, **options):
    sharded = right.fully_sharded(module, *args, **options)
    right.broadcast_state(sharded)
    return sharded
""")
    verdicts = run_file("production", path, only="fully_sharded")
    plain, *others = (verdict for verdict in verdicts if verdict.world_sizes)
    assert plain.check == "plain" and "broadcast values before or after" in plain.hint
    assert {verdict.evidence for verdict in others} == {"the same as in “plain”"}
    assert as_text(verdicts).count("the same as in “plain”") == len(others)


# -- chapter 17


@GSPMD
def test_shards_of_a_given_length_are_told_from_a_number_of_shards(tmp_path):
    text = mutants.named("17_gspmd", "parts_replicated_is_summed").code().replace("tensor.chunk(", "tensor.split(")
    verdict = verdict_on(tmp_path, "gspmd", "local_part", "two ranks", text)
    assert "the number of shards, or their length?" in verdict.hint


@GSPMD
def test_unequal_bytes_do_not_look_equal():
    assert describe_bytes(11_931_947, 11_931_946.67) == ["11,931,947.0", "11,931,946.7"]
    assert describe_bytes(1024, 2048.0) == ["1,024", "2,048"]
