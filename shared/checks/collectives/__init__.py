"""Checks for chapter 01: collectives by hand.

The notebook's kernel draws every rank's tensor and gives each rank only its own. Every message is recorded, with its
partner and its bytes. A result is compared with a float64 sum, and `mixture.py` explains wrong results.
"""

from shared.checks.collectives import launched, messages, values
from shared.checks.collectives.probes import COLLECTIVES, GIVE_BACK, RINGS, STEPS
from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints

ring_step = Exercise("1.1", "ring_step", first="values")
ring_reduce_scatter = Exercise("1.2", "ring_reduce_scatter", first="values")
ring_all_gather = Exercise("1.3", "ring_all_gather", first="values")
ring_all_reduce = Exercise("1.4", "ring_all_reduce", first="values")
tree_broadcast = Exercise("1.5", "tree_broadcast", first="values")
ring_step_in_turns = Exercise("1.6", "ring_step_in_turns", first="values")
direct_reduce_scatter = Exercise("1.7", "direct_reduce_scatter", first="values")
launch_reduce_scatter = Exercise("1.8", "launch_reduce_scatter", first="values")

EXERCISES = {
    exercise.piece: exercise
    for exercise in (
        ring_step,
        ring_reduce_scatter,
        ring_all_gather,
        ring_all_reduce,
        tree_broadcast,
        ring_step_in_turns,
        direct_reduce_scatter,
    )
}


def _check(pieces: tuple[str, ...], name: str, **options):
    """Register one judge with several exercises."""

    def register(judge):
        for piece in pieces:
            EXERCISES[piece].check(name, **options)(judge)
        return judge

    return register


_check(COLLECTIVES, "values")(values.right_where_n_divides)
tree_broadcast.check("receivers")(values.receivers_lose_their_old_values)
_check(STEPS, "values", world_sizes=(2, 3, 4))(values.each_rank_gets_its_left_neighbors_tensor)
_check(COLLECTIVES, "sizes")(values.right_for_any_size)
ring_all_gather.check("lengths", world_sizes=(2, 3, 4))(values.chunks_of_other_lengths_are_gathered)
_check(COLLECTIVES, "dtypes", world_sizes=(2, 4))(values.right_in_every_dtype)
_check(COLLECTIVES, "layout", world_sizes=(1, 2, 3))(values.right_or_rejected_if_not_contiguous)
ring_all_reduce.check("same bits", world_sizes=(3, 4))(values.every_rank_has_the_same_bits)

_check((*STEPS, *COLLECTIVES), "group", world_sizes=(3, 4))(values.right_within_a_group)
_check((*STEPS, *COLLECTIVES), "waits", world_sizes=(2, 4))(values.it_returns_when_its_messages_are_done)
_check((*STEPS, *GIVE_BACK), "argument", world_sizes=(2, 3, 4))(values.the_argument_is_unchanged)
_check(GIVE_BACK, "result")(values.the_result_is_new_memory)
_check(COLLECTIVES, "autograd", world_sizes=(1, 2))(values.no_gradient_is_recorded)

_check(STEPS, "wire", world_sizes=(2, 3, 4))(messages.as_many_bytes_as_the_formula_says)
_check(RINGS, "wire")(messages.as_many_bytes_as_the_formula_says)
_check((*RINGS, *STEPS), "at once", world_sizes=(4,))(messages.all_ranks_send_at_the_same_time)
_check(
    (*RINGS, "tree_broadcast", "ring_step_in_turns"), "more ranks", world_sizes=(1,), simulates=messages.WORLD_SIZES
)(messages.as_few_messages_among_more_ranks)
direct_reduce_scatter.check("wire", world_sizes=(2, 3, 4))(messages.one_all_to_all)
tree_broadcast.check("wire")(messages.n_minus_1_messages_in_few_rounds)
ring_step_in_turns.check("turns", world_sizes=(2, 3, 4))(messages.few_turns_with_blocking_calls)

launch_reduce_scatter.check("values")(launched.each_rank_gets_its_shard_of_the_sum)
launch_reduce_scatter.check("in place", world_sizes=(2, 3))(launched.the_sum_is_in_the_flat_tensor)
launch_reduce_scatter.check("at once", world_sizes=(2, 3))(launched.the_call_returns_at_once)
launch_reduce_scatter.check("all messages", world_sizes=(2, 3))(launched.every_message_is_waited_for)
launch_reduce_scatter.check("wire", world_sizes=(3, 4))(launched.each_rank_sends_every_other_rank_one_shard)
launch_reduce_scatter.check("memory", world_sizes=(4,))(launched.little_memory_is_needed)

_HINT_ON_PARTNERS = "Hint: for every N, does the rank that you send to or receive from exist in the group?"
_HINT_ON_PADDING = "The reduce-scatter pads its result. Hint: how long is `own_chunk`, and how long is that result?"
give_hints({"must match the size of tensor": values.HINT_ON_LENGTHS}, ring_reduce_scatter, ring_all_gather)
give_hints({"must match the size of tensor": _HINT_ON_PADDING}, ring_all_reduce)
give_hints(
    {"IndexError: ": _HINT_ON_PARTNERS, "is not part of group": _HINT_ON_PARTNERS},
    tree_broadcast,
    ring_step,
    ring_step_in_turns,
)
