"""Checks for chapter 13: layers, and then a whole GPT, that are split over the ranks.

Every rank sees the same batch. The checks compare outputs, losses and gradients with those of one process, in float64,
and judge what each rank holds and sends.
"""

import math
from dataclasses import replace

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.compare import nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import begin_at, give_hints, where_it_raises, where_only_this_fails
from shared.checks.engine.model_parallel.case import Case
from shared.checks.engine.model_parallel.judges import (
    Trained,
    judge_gradients,
    judge_layout,
    judge_memory,
    judge_outputs,
    judge_traffic,
    judge_training,
    train,
)
from shared.checks.tensor_parallel import besides_values, norms
from shared.checks.tensor_parallel.cases import (
    Columns,
    Copies,
    Embedding,
    Gated,
    Grouped,
    Layer,
    Loss,
    Rows,
    SumsPartials,
)
from shared.checks.tensor_parallel.models import Model

sum_over_ranks = Exercise("13.1a", "sum_over_ranks")
copy_to_ranks = Exercise("13.1b", "copy_to_ranks")
ColumnParallelLinear = Exercise("13.2", "ColumnParallelLinear")
RowParallelLinear = Exercise("13.3", "RowParallelLinear")
ParallelGatedMLP = Exercise("13.4", "ParallelGatedMLP")
ParallelGroupedAttention = Exercise("13.5", "ParallelGroupedAttention")
VocabParallelEmbedding = Exercise("13.6", "VocabParallelEmbedding")
vocab_parallel_cross_entropy = Exercise("13.7", "vocab_parallel_cross_entropy", first="plain loss")
parallelize = Exercise("13.8", "parallelize")
clip_grad_norm_ = Exercise("13.9", "parallelize")


def judge_plainly(attempt: Attempt, case: Case) -> None:
    """Judge what the exercise is about, on a plain case."""
    trained = train(attempt, case, longer=False)
    for each in trained:
        judge_layout(each)
        judge_outputs(each)
        judge_gradients(each)


def judge_in_groups(attempt: Attempt, case: Case) -> None:
    """Let two groups of ranks work side by side."""
    for trained in train(attempt, case, in_groups=True):
        judge_training(trained)
        judge_traffic(trained)


def judge_everything(attempt: Attempt, case: Case) -> None:
    for trained in train(attempt, case):
        judge_layout(trained)
        judge_training(trained)
        judge_traffic(trained)


def twelve_times(attempt: Attempt) -> int:
    """Draw a size that 1 to 4 ranks divide."""
    return 12 * attempt.random.randint(1, 4)


# -- 13.1


def check_operator(exercise: Exercise, plain: str, case: type) -> None:
    """Register the checks of an operator."""

    @exercise.check(plain, world_sizes=(2,))
    def it_is_right_on_two_ranks(attempt: Attempt) -> None:
        judge_plainly(attempt, case())

    @exercise.check("wire")
    def it_sends_once_in_one_direction(attempt: Attempt) -> None:
        judge_everything(attempt, case(width=twelve_times(attempt), outputs=twelve_times(attempt)))

    @exercise.check("group", world_sizes=(3, 4))
    def groups_work_side_by_side(attempt: Attempt) -> None:
        judge_in_groups(attempt, case())

    exercise.check("several calls", world_sizes=(3,))(besides_values.calls_do_not_share_anything)


check_operator(sum_over_ranks, "plain sum", SumsPartials)
check_operator(copy_to_ranks, "plain gradient", Copies)


# -- 13.2 to 13.6


HINT_ON_OPERATORS = "Hint: which operators does this layer get, and which lines have to use them?"
HINT_ON_NONE = {"NoneType": "Hint: what is None here? Does every linear layer have a bias?"}
HINTS_IN_GROUPS = {Embedding.hint_on_output: "Hint: whose rank does `dist.get_rank` return here?"}
HINT_ON_COLLECTIVES = "Hint: which line calls a collective directly, so that autograd does not record it?"


def check_layer(exercise: Exercise, plain: str, cases: tuple[Layer, ...], tokens: Layer) -> None:
    """Register the checks of a layer. The first case is the plain one, `tokens` one with other operators."""

    @exercise.check(plain, world_sizes=(2,))
    def it_is_right_on_two_ranks(attempt: Attempt) -> None:
        judge_plainly(attempt, cases[0])

    @exercise.check("training")
    def it_trains_as_in_one_process(attempt: Attempt) -> None:
        for case in cases:
            for trained in train(attempt, case):
                judge_layout(trained)
                judge_training(trained)

    @exercise.check("wire", world_sizes=(2, 3, 4))
    def it_sends_what_the_formula_says(attempt: Attempt) -> None:
        for case in cases:
            for trained in train(attempt, case, longer=False):
                judge_traffic(trained)

    @exercise.check("operators", world_sizes=(2, 3))
    @where_it_raises(HINT_ON_NONE | {"": HINT_ON_OPERATORS})
    def it_uses_the_operators_that_it_gets(attempt: Attempt) -> None:
        for trained in train(attempt, replace(tokens, by_tokens=True)):
            judge_training(trained)
            judge_traffic(trained)

    @exercise.check("group", world_sizes=(3, 4))
    @where_only_this_fails(lambda attempt: judge_plainly(attempt, cases[-1]), HINTS_IN_GROUPS)
    def groups_work_side_by_side(attempt: Attempt) -> None:
        judge_in_groups(attempt, cases[-1])

    @exercise.check("memory", world_sizes=(2, 4))
    def each_rank_holds_its_shards(attempt: Attempt) -> None:
        judge_memory(attempt, cases[0])


check_layer(
    ColumnParallelLinear,
    "plain columns",
    (
        Columns(),
        Columns(bias=False),
        Columns(gather_output=True),
        Columns(outputs=12, gather_output=True, bias=False),
        Columns(flat=True),
    ),
    Columns(),
)
# A bias that every rank has gets only a partial gradient from a rank's own tokens.
check_layer(
    RowParallelLinear, "plain rows", (Rows(), Rows(bias=False), Rows(flat=True), Rows(width=36)), Rows(bias=False)
)
check_layer(ParallelGatedMLP, "plain gate", (Gated(), Gated(inner=24), Gated(flat=True)), Gated())
check_layer(
    ParallelGroupedAttention, "one kv head", (Grouped(), Grouped(kv_heads=12), Grouped(head_width=3)), Grouped()
)
check_layer(
    VocabParallelEmbedding,
    "plain vocabulary",
    (Embedding(), Embedding(vocabulary=25), Embedding(padding_idx=20), Embedding(flat=True), Embedding(5)),
    Embedding(),
)
ColumnParallelLinear.check("rejections", world_sizes=(2, 3))(besides_values.outputs_that_do_not_divide)
RowParallelLinear.check("rejections", world_sizes=(2, 3))(besides_values.inputs_that_do_not_divide)
ParallelGatedMLP.check("rejections", world_sizes=(2, 3))(besides_values.inner_elements_that_do_not_divide)


@ParallelGroupedAttention.check("shared kv heads", world_sizes=(4,))
def two_ranks_share_a_kv_head(attempt: Attempt) -> None:
    judge_everything(attempt, Grouped(kv_heads=2))
    judge_memory(attempt, Grouped(kv_heads=2))


ParallelGroupedAttention.check("rejections", world_sizes=(2, 3))(besides_values.heads_that_do_not_divide)


# -- 13.7


def judge_losses(attempt: Attempt, case: Loss) -> None:
    """Judge the loss and the gradients, and recognize common mistakes in the loss."""
    trained = train(attempt, case, longer=False)
    for each in trained:
        _name_the_mistake(each)
        judge_outputs(each)
        judge_gradients(each)


def _name_the_mistake(trained: Trained) -> None:
    expected, size = trained.expected[0].loss, len(trained.members)
    for rank, result in trained.found.items():
        loss = result.steps[0].loss
        assert loss is not None
        hints = {
            "Hint: what does your code do with a logit that is −∞?": loss.isnan(),
            "It is not finite. Hint: how large is the largest exponent?": not loss.isfinite(),
            f"It is too large by log {size}. Hint: which columns does a rank's sum contain?": nearly_equal(
                loss, expected + math.log(size)
            ),
            "It is the sum over the targets. Hint: is the loss a sum or a mean?": nearly_equal(
                loss, expected * trained.draw.batches[0][1].numel()
            ),
            "It is close, but not as precise as float64. Hint: in which dtype is it computed?": (
                not nearly_equal(loss, expected) and nearly_equal(loss, expected, 1e-5)
            ),
        }
        for hint, applies in hints.items():
            if applies:
                message = f"{trained.at(0)}, the loss is {loss.item():.10g}, expected {expected.item():.10g}"
                raise Wrong({rank: message}, hint)


vocab_parallel_cross_entropy.check("plain loss", world_sizes=(2,))(on_each(judge_losses, Loss()))


@vocab_parallel_cross_entropy.check("training")
def the_loss_trains_as_in_one_process(attempt: Attempt) -> None:
    for case in (Loss(outputs=twelve_times(attempt)), Loss(flat=True), Loss(weight=0.25)):
        judge_everything(attempt, case)


vocab_parallel_cross_entropy.check("large logits", world_sizes=(2, 3))(
    on_each(judge_losses, Loss(scale=3000.0), Loss(scale=30.0))
)
vocab_parallel_cross_entropy.check("padding", world_sizes=(2, 4))(
    on_each(judge_losses, Loss(vocabulary=17), Loss(vocabulary=5))  # 5: all logits of some ranks are padding
)
vocab_parallel_cross_entropy.check("group", world_sizes=(3, 4))(on_each(judge_in_groups, Loss()))
vocab_parallel_cross_entropy.check("bf16", world_sizes=(2,))(besides_values.a_loss_of_bf16_logits_is_exact)


# -- 13.8 and 13.9


parallelize.check("plain model", world_sizes=(2,))(on_each(judge_plainly, Model()))


@parallelize.check("sequence parallelism", world_sizes=(2, 3))
def a_gpt_is_split_by_tokens(attempt: Attempt) -> None:
    for trained in train(attempt, Model(sequence_parallel=True)):
        judge_layout(trained)
        judge_training(trained)


@parallelize.check("models")
def awkward_gpts_train_as_in_one_process(attempt: Attempt) -> None:
    for sequence_parallel in (False, True):
        for case in (
            Model(vocabulary=25, sequence_parallel=sequence_parallel),
            Model(layers=1, vocabulary=25, by_logits=True, sequence_parallel=sequence_parallel),
            Model(layers=1, tied=False, alike=True, vocabulary=5, sequence_parallel=sequence_parallel),
            Model(layers=1, biases=True, tied=False, head_width=2, sequence_parallel=sequence_parallel),
        ):
            for trained in train(attempt, case):
                judge_layout(trained)
                judge_training(trained)
                judge_traffic(trained)


@parallelize.check("accumulation", world_sizes=(2, 3))
def gradients_accumulate(attempt: Attempt) -> None:
    for sequence_parallel in (False, True):
        for trained in train(attempt, Model(layers=1, accumulates=True, sequence_parallel=sequence_parallel)):
            judge_training(trained)


@parallelize.check("wire", world_sizes=(2, 3, 4))
def layers_send_what_the_formula_says(attempt: Attempt) -> None:
    for sequence_parallel in (False, True):
        for trained in train(attempt, Model(layers=3, sequence_parallel=sequence_parallel), longer=False):
            judge_traffic(trained)


@parallelize.check("group", world_sizes=(3, 4))
def groups_split_a_gpt_side_by_side(attempt: Attempt) -> None:
    judge_in_groups(attempt, Model(layers=1, sequence_parallel=attempt.world_size == 4))


@parallelize.check("memory", world_sizes=(2, 4))
def each_rank_holds_its_part_of_a_gpt(attempt: Attempt) -> None:
    for sequence_parallel in (False, True):
        judge_memory(attempt, Model(tied=not sequence_parallel, sequence_parallel=sequence_parallel))


parallelize.check("activations", world_sizes=(4,))(besides_values.tokens_divide_activations)
parallelize.check("bf16", world_sizes=(2, 4))(besides_values.a_bf16_gpt_stays_bf16)
parallelize.check("AdamW", world_sizes=(2, 4))(norms.adamw_equals_one_process)
parallelize.check("rejections", world_sizes=(2, 3))(besides_values.a_gpt_that_does_not_divide)

clip_grad_norm_.check("plain norm", world_sizes=(2,))(norms.a_plain_norm_is_clipped)
clip_grad_norm_.check("clipping")(norms.clipping_equals_one_process)
clip_grad_norm_.check("one element", world_sizes=(2, 3))(norms.clipping_sends_one_element)
clip_grad_norm_.check("bf16 norm", world_sizes=(2,))(
    begin_at(norms.a_plain_norm_is_clipped, "plain norm")(norms.a_norm_of_bf16_gradients_is_exact)
)

give_hints(HINT_ON_NONE, ColumnParallelLinear, RowParallelLinear)
give_hints(
    {
        "must match the size of tensor": (
            "Hint: which layers get `enter`, and which `leave`? Does the embedding get one?"
        ),
        "Size does not match at dimension": (
            "Hint: the logits have T/N tokens. Which layer has to gather them, and with which operator?"
        ),
    },
    parallelize,
    clip_grad_norm_,
)
give_hints(
    {
        "this rank holds output.weight": "Hint: is output.weight the same parameter as token_embedding.weight?",
        "no attribute 'clip_grad_norm_'": "Hint: does parallelize() change the class of the model?",
        "forward returned a tensor of shape": "Hint: which part of the outputs does this rank return?",
        "does not require grad": HINT_ON_COLLECTIVES,
        "has been overwritten": "Hint: which operation of yours changes a tensor in place?",
    },
    *(value for value in list(globals().values()) if isinstance(value, Exercise)),
)
