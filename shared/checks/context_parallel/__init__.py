"""Checks for chapter 14: sequences that are split over the ranks, and attention over all of their tokens.

The kernel draws a whole sequence, and gives each rank its own shard. Results and gradients are compared with those of
one process, in float64. The checks also judge what is sent, whether it overlaps with products of matrices, and whether
pairs of chunks that the mask hides are skipped.
"""

from shared.checks.context_parallel import attention, model, pairs, sequences, traffic
from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints

shard_sequence = Exercise("14.1a", "shard_sequence", first="plain shards")
unshard_sequence = Exercise("14.1b", "unshard_sequence", first="plain sequence")
visible_pairs = Exercise("14.2", "visible_pairs", first="the example")
merge = Exercise("14.3", "merge", first="two parts")
ring_forward = Exercise("14.4", "ring_forward", first="plain ring")
ring_attention = Exercise("14.5", "ring_attention", first="plain gradients")
all_to_all_attention = Exercise("14.6", "all_to_all_attention", first="plain attention")
ContextParallelGPT = Exercise("14.7", "ContextParallelGPT", first="plain model")

shard_sequence.check("plain shards", world_sizes=(2,))(sequences.shards_on_two_ranks)
shard_sequence.check("both orders")(sequences.shards_in_both_orders)
shard_sequence.check("gradients", world_sizes=(2,))(sequences.shards_pass_gradients)
shard_sequence.check("group", world_sizes=(3, 4))(sequences.shards_in_a_group)
shard_sequence.check("rejections", world_sizes=(1, 2, 3))(sequences.shard_rejects_other_lengths)

unshard_sequence.check("plain sequence", world_sizes=(2,))(sequences.unshards_on_two_ranks)
unshard_sequence.check("both orders")(sequences.unshards_in_both_orders)
unshard_sequence.check("wire", world_sizes=(2, 4))(sequences.unshard_sends_each_shard_once)
unshard_sequence.check("group", world_sizes=(3, 4))(sequences.unshards_in_a_group)
unshard_sequence.check("rejections", world_sizes=(2, 3))(sequences.unshard_rejects_unequal_shards)

visible_pairs.check("the example", world_sizes=(1,))(pairs.the_example_is_right)
visible_pairs.check("brute force", world_sizes=(1,), simulates=tuple(range(1, pairs.MOST_RANKS + 1)))(
    pairs.pairs_equal_brute_force
)

merge.check("two parts", world_sizes=(1,))(pairs.two_parts_are_merged)
merge.check("many parts", world_sizes=(1,))(pairs.any_parts_are_merged)
merge.check("large scores", world_sizes=(1,))(pairs.large_scores_do_not_overflow)

RINGS, ATTENTIONS = (ring_forward, ring_attention), (ring_forward, ring_attention, all_to_all_attention)


def _check(exercises: tuple[Exercise, ...], name: str, judge, **options) -> None:
    """Register one judge with several exercises."""
    for exercise in exercises:
        exercise.check(name, **options)(judge)


_check((ring_forward,), "plain ring", attention.plain, world_sizes=(2,))
_check((ring_attention,), "plain gradients", attention.plain, world_sizes=(2,))
_check((all_to_all_attention,), "plain attention", attention.plain, world_sizes=(2,))
_check(RINGS, "causal", attention.causal, world_sizes=(2,))
_check(RINGS, "both orders", attention.every_order)
_check((all_to_all_attention,), "heads and masks", attention.every_order)
_check(RINGS, "wire", traffic.neighbors_send_few_bytes)
_check((all_to_all_attention,), "wire", traffic.swaps_send_few_bytes, world_sizes=(2, 3, 4))
_check(RINGS, "overlap", traffic.transfers_overlap, world_sizes=(2, 3, 4))
_check(RINGS, "skipped pairs", traffic.hidden_pairs_are_skipped, world_sizes=(4,))
_check((ring_attention,), "memory", traffic.only_own_blocks_are_kept, world_sizes=(4,))
_check(ATTENTIONS, "group", attention.in_a_group, world_sizes=(3, 4))
_check(RINGS, "bf16", attention.accumulates_in_float32, world_sizes=(4,))
_check(ATTENTIONS[1:], "rejections", attention.rejects_unequal_shards, world_sizes=(1, 2, 3))

ContextParallelGPT.check("plain model", world_sizes=(2,))(model.a_plain_gpt_on_two_ranks)
ContextParallelGPT.check("both orders")(model.gpts_in_both_orders)
ContextParallelGPT.check("ignored targets", world_sizes=(2, 4))(model.ignored_targets_do_not_count)
ContextParallelGPT.check("group", world_sizes=(3, 4))(model.gpts_in_a_group)

give_hints(
    {
        "must match the size of tensor": "Hint: which chunk of the queries meets which chunk of the keys?",
        "has been overwritten": "Hint: which operation of yours changes a tensor in place?",
        "does not require a gradient": "Hint: which line takes the output out of the graph?",
    },
    ring_forward,
    ring_attention,
    all_to_all_attention,
    ContextParallelGPT,
)
