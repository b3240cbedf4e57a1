"""Checks for chapter 17: the rules, the choices and the collectives of a partitioner.

No check compares with our own partitioner. `trying.py` finds out by trying which placements work, and which way is the
cheapest. What the ranks compute is compared with one process, in float64, and what they send with the formulas.
"""

from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints
from shared.checks.gspmd import choices, rules, running

local_part = Exercise("17.1", "local_part")
shard_rules = Exercise("17.2", "shard_rules", first="matrix product")
partial_rules = Exercise("17.3", "partial_rules", first="matrix product")
rounds_and_bytes = Exercise("17.4", "rounds_and_bytes")
propagate = Exercise("17.5", "propagate", first="plain products")
redistribute = Exercise("17.6", "redistribute", first="plain changes")
execute = Exercise("17.7", "execute", first="plain product")
ranks_along = Exercise("17.8a", "ranks_along")
two_axes = Exercise("17.8b", "execute")
propagate_on_two_axes = Exercise("17.8c", "propagate")
reshape_rules = Exercise("17.9", "reshape_rules")

local_part.check("two ranks", world_sizes=(1,))(rules.two_ranks_hold_a_matrix)
local_part.check("more ranks", world_sizes=(1,))(rules.many_ranks_hold_tensors)
local_part.check("rejections", world_sizes=(1,))(rules.lengths_that_do_not_divide)

shard_rules.check("matrix product", world_sizes=(1,))(rules.a_matrix_product_by_letters)
shard_rules.check("other operations", world_sizes=(1,))(rules.other_operations_by_letters)
partial_rules.check("matrix product", world_sizes=(1,))(rules.a_matrix_product_of_terms)
partial_rules.check("other operations", world_sizes=(1,))(rules.other_operations_of_terms)

rounds_and_bytes.check("cost", world_sizes=(1,))(choices.every_operation_has_its_cost)

propagate.check("plain products", world_sizes=(1,))(choices.plain_products)
propagate.check("cheapest", world_sizes=(1,))(choices.the_cheapest_way_along_one_axis)
propagate.check("equal plans", world_sizes=(1,))(choices.the_first_of_equal_plans)

redistribute.check("plain changes", world_sizes=(2,))(running.plain_changes)
redistribute.check("dimensions")(running.changes_of_all_dimensions)
redistribute.check("group", world_sizes=(3, 4))(running.changes_in_groups)
redistribute.check("rejections", world_sizes=(2, 4))(running.changes_that_are_rejected)

execute.check("plain product", world_sizes=(2,))(running.plain_product)
execute.check("operations")(running.drawn_operations)
execute.check("wire", world_sizes=(2, 4))(running.bytes_as_propagated)
execute.check("DTensor", world_sizes=(2, 4))(running.as_dtensor_does)
execute.check("group", world_sizes=(3, 4))(running.operations_in_groups)
execute.check("rejections", world_sizes=(2, 3))(running.lengths_that_do_not_divide)

ranks_along.check("along an axis", world_sizes=(1,))(running.ranks_along_every_axis)
ranks_along.check("one axis alone", world_sizes=(1,))(running.one_axis_changes_alone)
two_axes.check("plain mesh", world_sizes=(4,))(running.plain_product_on_a_mesh)
two_axes.check("meshes", world_sizes=(2, 4))(running.drawn_operations_on_meshes)
two_axes.check("nested shards", world_sizes=(4,))(running.nested_shards)
two_axes.check("mesh wire", world_sizes=(4,))(running.bytes_on_a_mesh)
propagate_on_two_axes.check("cheapest on a mesh", world_sizes=(1,))(choices.the_cheapest_way_on_a_mesh)

reshape_rules.check("heads", world_sizes=(1,))(rules.columns_become_heads)
reshape_rules.check("reshapes", world_sizes=(1,))(rules.other_reshapes)
reshape_rules.check("local shape", world_sizes=(1,))(rules.shapes_of_shards)

give_hints(
    {
        "index out of range": (
            "Hint: how many shards does your call return here? Is its argument the number of shards, or their length?"
        ),
        "size of tensor": "Hint: which placements do the shards in this operation have?",
        "KeyError: 'whole_from'": "Hint: have you run the cell that defines whole_from?",
        "'NoneType' object has no attribute 'output'": "Hint: does plan_for return the plan?",
    },
    *(value for value in list(globals().values()) if isinstance(value, Exercise)),
)
