"""Checks for chapter 06: counting a rank's memory, mixed precision by hand, and activation checkpointing.

Nothing is sent in this chapter, so most checks run on one rank alone. Values are compared with one process in full
precision. Bytes are counted by storage, so that the name under which a tensor is kept does not matter.
"""

from shared.checks.engine.framework import Exercise
from shared.checks.memory_wall import (
    master_state,
    master_values,
    placement,
    recompute_order,
    recompute_values,
    state_count,
)

model_state_bytes = Exercise("6.1", "model_state_bytes")
HoldsMasters = Exercise("6.2", "HoldsMasters")
MasterWeights = Exercise("6.3", "MasterWeights")
Checkpointed = Exercise("6.4", "Checkpointed")
activation_peak_bytes = Exercise("6.5, part 1", "activation_peak_bytes")
place_checkpoints = Exercise("6.5, part 2", "place_checkpoints")

model_state_bytes.check("values", world_sizes=(1,))(state_count.counted_to_the_byte)
model_state_bytes.check("without shared.memory", world_sizes=(1,))(state_count.without_the_ledger)

HoldsMasters.check("plain", world_sizes=(1, 2))(master_values.one_parameter_is_its_rounded_master)
HoldsMasters.check("other dtypes", world_sizes=(1,))(master_values.every_dtype_has_a_master_of_its_own)
HoldsMasters.check("settings", world_sizes=(1,))(master_values.after_plain(master_values.settings_are_those_of_now))
HoldsMasters.check("state", world_sizes=(1,))(master_state.the_state_is_enough)
HoldsMasters.check("memory", world_sizes=(1,))(master_values.after_plain(master_state.twelve_bytes_stay))
HoldsMasters.check("one gradient", world_sizes=(1,))(master_values.after_plain(master_state.one_gradient_at_a_time))

MasterWeights.check("values", world_sizes=(1, 2))(master_values.parameters_are_rounded_masters)
MasterWeights.check("groups", world_sizes=(1,))(master_values.groups_have_settings_of_their_own)
MasterWeights.check("small updates", world_sizes=(1,))(master_values.masters_move_where_parameters_would_not)
MasterWeights.check("no gradient", world_sizes=(1,))(master_values.what_has_no_gradient_stays)
MasterWeights.check("schedulers", world_sizes=(1,))(
    master_values.after_values(master_values.after_groups(master_values.settings_are_those_of_now))
)
MasterWeights.check("closure", world_sizes=(1,))(master_state.a_closure_runs_first)
MasterWeights.check("inside another", world_sizes=(1,))(master_values.another_optimizer_may_hold_it)
MasterWeights.check("checkpoint", world_sizes=(1,))(master_state.training_goes_on)
MasterWeights.check("memory", world_sizes=(1,))(master_values.after_values(master_state.twelve_bytes_stay))
MasterWeights.check("one gradient", world_sizes=(1,))(master_values.after_values(master_state.one_gradient_at_a_time))

Checkpointed.check("values", world_sizes=(1, 2))(recompute_values.gradients_are_those_without_it)
Checkpointed.check("twice", world_sizes=(1,))(recompute_values.the_module_runs_twice)
Checkpointed.check("dropout", world_sizes=(1,))(recompute_values.dropout_drops_the_same)
Checkpointed.check("order", world_sizes=(1,))(recompute_order.backward_finds_its_own_forward)
Checkpointed.check("changed inputs", world_sizes=(1,))(recompute_order.changed_inputs_are_rejected)
Checkpointed.check("autocast", world_sizes=(1,))(recompute_order.recomputation_uses_forwards_autocast)
Checkpointed.check("hooks", world_sizes=(1,))(recompute_order.hooks_see_whole_gradients_once)
Checkpointed.check("memory", world_sizes=(1,))(recompute_order.only_inputs_are_kept)
Checkpointed.check("nothing kept", world_sizes=(1,))(recompute_order.nothing_is_left)

activation_peak_bytes.check("values", world_sizes=(1,))(placement.peaks_are_predicted)
place_checkpoints.check("fewest", world_sizes=(1,))(placement.as_few_as_possible)
place_checkpoints.check("too little memory", world_sizes=(1,))(placement.the_lowest_peak_is_named)
