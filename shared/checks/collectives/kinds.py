"""The functions of chapter 01 by kind."""

STEPS = ("ring_step", "ring_step_in_turns")
GIVE_BACK = ("ring_reduce_scatter", "ring_all_gather", "direct_reduce_scatter")
IN_PLACE = ("ring_all_reduce", "tree_broadcast")
COLLECTIVES = (*GIVE_BACK, *IN_PLACE)
RINGS = ("ring_reduce_scatter", "ring_all_gather", "ring_all_reduce")
