"""Checks for chapter 16: a mixture of experts in one process, and the same layer with its experts on several ranks.

Each rank brings its own tokens. The checks compare outputs and gradients with those of one process that runs all
ranks' tokens, in float64, and judge what each rank holds and sends.
"""

from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints
from shared.checks.expert_parallel import exchanging, gradients, judges, routing

route = Exercise("16.1", "route", first="plain routing")
sort_by_expert = Exercise("16.2", "sort_by_expert", first="plain order")
exchange_counts = Exercise("16.3a", "exchange_counts", first="plain counts")
exchange_rows = Exercise("16.3b", "exchange_rows", first="plain rows")
ExpertParallelMoE = Exercise("16.4", "ExpertParallelMoE", first="plain layer")
average_gradients = Exercise("16.5", "average_gradients", first="plain mean")
clip_grad_norm_ = Exercise("16.6", "clip_grad_norm_", first="plain norm")

route.check("plain routing", world_sizes=(2,))(routing.a_plain_route)
route.check("other k and E", world_sizes=(1, 2))(routing.other_sizes)
route.check("balancing loss", world_sizes=(1, 2))(routing.the_balancing_loss)
route.check("no tokens", world_sizes=(2,))(routing.no_tokens)

sort_by_expert.check("plain order", world_sizes=(2,))(routing.a_plain_order)
sort_by_expert.check("experts without tokens", world_sizes=(2,))(routing.experts_without_tokens)
sort_by_expert.check("capacity", world_sizes=(2,))(routing.a_capacity_keeps_the_first)

exchange_counts.check("plain counts", world_sizes=(2,))(exchanging.plain_counts)
exchange_counts.check("other sizes")(exchanging.counts_of_other_sizes)
exchange_counts.check("group", world_sizes=(3, 4))(exchanging.counts_in_groups)

exchange_rows.check("plain rows", world_sizes=(2,))(exchanging.plain_rows)
exchange_rows.check("gradients")(exchanging.gradients_go_back)
exchange_rows.check("nothing to send")(exchanging.ranks_that_send_nothing)
exchange_rows.check("wire", world_sizes=(2, 3, 4))(exchanging.rows_are_sent_once)
exchange_rows.check("group", world_sizes=(3, 4))(exchanging.rows_in_groups)

ExpertParallelMoE.check("plain layer", world_sizes=(2,))(judges.a_plain_layer)
ExpertParallelMoE.check("several sizes")(judges.layers_of_several_sizes)
ExpertParallelMoE.check("no tokens")(judges.ranks_and_experts_without_tokens)
ExpertParallelMoE.check("capacity", world_sizes=(1, 2, 3))(judges.layers_with_a_capacity)
ExpertParallelMoE.check("wire", world_sizes=(2, 3, 4))(judges.rows_are_sent_once)
ExpertParallelMoE.check("group", world_sizes=(3, 4))(judges.layers_in_groups)
ExpertParallelMoE.check("memory", world_sizes=(2, 4))(judges.each_rank_holds_its_experts)
ExpertParallelMoE.check("rejections", world_sizes=(2, 3))(judges.layers_that_do_not_divide)

average_gradients.check("plain mean", world_sizes=(2,))(gradients.plain_means)
average_gradients.check("missing gradients")(gradients.means_of_what_there_is)
average_gradients.check("group", world_sizes=(3, 4))(gradients.means_in_groups)
average_gradients.check("copies of experts", world_sizes=(2, 4))(gradients.means_of_copies)

clip_grad_norm_.check("plain norm", world_sizes=(2,))(gradients.a_plain_norm)
clip_grad_norm_.check("clipping")(gradients.norms_of_what_there_is)
clip_grad_norm_.check("bf16", world_sizes=(2,))(gradients.a_norm_in_bf16)

give_hints(
    {
        "must be contiguous": "Hint: which of the tensors that you send may be a view?",
        "do not require grad": "Hint: does autograd record a collective?",
        "match total dim 0 size": "Hint: which list has the sizes of what is sent, and which of what is received?",
        "split_with_sizes expects": "Hint: how many rows has each local expert, from all ranks together?",
        "has been overwritten": "Hint: which operation of yours changes a tensor in place?",
    },
    *(value for value in list(globals().values()) if isinstance(value, Exercise)),
)
