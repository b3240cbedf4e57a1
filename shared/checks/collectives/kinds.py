"""What kind of piece each of chapter 01 is, by its name."""

STEPS = ("ring_step", "ring_step_in_turns")
GIVE_BACK = ("ring_reduce_scatter", "ring_all_gather", "direct_reduce_scatter")
IN_PLACE = ("ring_all_reduce", "tree_broadcast")
COLLECTIVES = (*GIVE_BACK, *IN_PLACE)
RINGS = ("ring_reduce_scatter", "ring_all_gather", "ring_all_reduce")
