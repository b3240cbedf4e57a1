"""Checks for chapter 15: schedules, and then a model whose layers are spread over the stages of a pipeline.

Every stage sees the same batch. The checks compare losses and gradients with those of one process, in float64, and
judge what each stage holds and sends.
"""

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints
from shared.checks.engine.model_parallel.judges import judge_gradients, judge_layout, judge_memory, judge_outputs, train
from shared.checks.pipeline import messages, orders, training
from shared.checks.pipeline.cases import Stack, Text

alternate = Exercise("15.1", "alternate")
under_limit = Exercise("15.2", "under_limit")
interleaved = Exercise("15.3", "interleaved")
Neighbors = Exercise("15.4", "Neighbors")
Chunk = Exercise("15.5", "Chunk")
Pipeline = Exercise("15.6", "Pipeline")
sum_tied_gradients = Exercise("15.7", "Pipeline")
clip_grad_norm_ = Exercise("15.8", "Pipeline")
zero_bubble = Exercise("15.9", "zero_bubble")

alternate.check("order", world_sizes=(1,))(orders.forwards_and_backwards_alternate)

under_limit.check("the table", world_sizes=(1,))(orders.the_times_of_the_table)
under_limit.check("any limit", world_sizes=(1,))(orders.limits_are_kept)

interleaved.check("the example", world_sizes=(1,))(orders.the_example_comes_out)
interleaved.check("bubble and memory", world_sizes=(1,))(orders.chunks_shrink_the_bubble)
interleaved.check("rejections", world_sizes=(1,))(orders.what_does_not_divide_is_rejected)

Neighbors.check("plain messages", world_sizes=(2,))(messages.plain_messages_arrive)
Neighbors.check("at once", world_sizes=(2, 3))(messages.sends_never_wait)
Neighbors.check("ring")(messages.messages_arrive_in_a_ring)
Neighbors.check("in flight", world_sizes=(2, 3))(messages.what_is_on_its_way_is_kept)
Neighbors.check("freed", world_sizes=(2, 3))(messages.what_has_arrived_is_freed)
Neighbors.check("finish", world_sizes=(2,), once=True)(messages.finish_waits)
Neighbors.check("group", world_sizes=(3, 4))(messages.messages_stay_in_their_group)

Chunk.check("plain chunk", world_sizes=(1,))(messages.a_plain_micro_batch)
Chunk.check("micro-batches", world_sizes=(1,))(messages.many_micro_batches)
Chunk.check("first and last", world_sizes=(1,))(messages.the_first_and_the_last_chunk)
Chunk.check("frozen", world_sizes=(1,))(messages.frozen_layers_need_no_backward)


@Pipeline.check("plain model", world_sizes=(2,))
def a_plain_model_trains_on_two_stages(attempt: Attempt) -> None:
    case = Stack(layers=4)
    for trained in train(attempt, case, longer=False):
        judge_layout(trained)
        training.judge_scale(trained, case)
        judge_outputs(trained)
        judge_gradients(trained)


Pipeline.check("schedules")(training.every_schedule_trains)
Pipeline.check("postponed weights", world_sizes=(2, 3))(training.postponed_weights_train)
Pipeline.check("no waiting", world_sizes=(2,))(training.the_first_stage_does_not_wait)
Pipeline.check("wire", world_sizes=(2, 3, 4))(training.messages_are_as_the_formula_says)
Pipeline.check("one forward", world_sizes=(1, 2))(training.each_layer_computes_once)
Pipeline.check("bf16", world_sizes=(2, 3))(training.bf16_stays_bf16)


@Pipeline.check("memory", world_sizes=(2, 4))
def each_stage_holds_its_layers(attempt: Attempt) -> None:
    judge_memory(attempt, Stack("1f1b", layers=8))


@sum_tied_gradients.check("tied GPT", world_sizes=(2,))
def a_tied_gpt_trains_on_two_stages(attempt: Attempt) -> None:
    for trained in train(attempt, Text(layers=2), longer=False):
        judge_layout(trained)
        judge_outputs(trained)
        judge_gradients(trained)


sum_tied_gradients.check("models")(training.tied_models_train)
sum_tied_gradients.check("many ties", world_sizes=(3, 4))(training.many_ties_train)
sum_tied_gradients.check("same bits", world_sizes=(3, 4))(training.copies_stay_equal)
sum_tied_gradients.check("tied wire", world_sizes=(2, 4))(training.only_holders_exchange)
sum_tied_gradients.check("group", world_sizes=(3, 4))(training.groups_work_side_by_side)
sum_tied_gradients.check("AdamW", world_sizes=(2, 4))(training.adamw_equals_one_process)

clip_grad_norm_.check("plain norm", world_sizes=(2,))(training.a_plain_norm_is_clipped)
clip_grad_norm_.check("clipping")(training.clipping_equals_one_process)
clip_grad_norm_.check("clipping many ties", world_sizes=(3, 4))(training.many_ties_are_counted_once)
clip_grad_norm_.check("one element", world_sizes=(2, 3))(training.clipping_sends_one_element)
# The last one, because NCCL's pipelines form groups. torch names a group after the number of groups that a rank has, so
# ranks of which only some have formed groups could not form the next one together.
clip_grad_norm_.check("clipping group", world_sizes=(3, 4))(training.clipping_stays_in_its_group)

zero_bubble.check("bubble and memory", world_sizes=(1,))(orders.weights_come_late)

give_hints(
    {
        "tensor has to be contiguous": "Hint: is the tensor that this line sends or fills always contiguous?",
        "no attribute 'clip_grad_norm_'": "Hint: is the method in the last class named Pipeline?",
        "element 0 of tensors does not require grad": "Hint: is there anything for backward to compute here?",
    },
    *(value for value in list(globals().values()) if isinstance(value, Exercise)),
)
