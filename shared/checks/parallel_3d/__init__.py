"""Checks for chapter 18: layouts of ranks in a mesh, and a GPT that is trained on a mesh of dp × pp × tp ranks.

Every rank sees the same global batch. The checks compare losses, gradients, norms and parameters with those of one
process, in float64, and count the bytes that each rank sends along each axis.
"""

from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints
from shared.checks.parallel_3d import choices, traffic, training
from shared.checks.parallel_3d import coordinates as places

# A file of parallel_3d may leave these out, because they belong to the module layouts.
coordinates = Exercise("18.1a", "coordinates")
ranks_along = Exercise("18.1b", "ranks_along")
make_mesh = Exercise("18.2", "make_mesh")
step_bytes = Exercise("18.3a", "step_bytes")
leaving_bytes = Exercise("18.3b", "leaving_bytes")
split_model = Exercise("18.4", "split_model", first="plain split")
Parallel3D = Exercise("18.5", "Parallel3D", first="plain replicas")
clip_grad_norm_ = Exercise("18.6", "Parallel3D", first="plain norm")
bubble_s = Exercise("18.7a", "bubble_s")
choose_layouts = Exercise("18.7b", "choose_layouts")

coordinates.check("the table", world_sizes=(1,))(places.the_table_comes_out)
coordinates.check("meshes", world_sizes=(1,))(places.drawn_meshes)
ranks_along.check("the table's groups", world_sizes=(1,))(places.groups_of_the_table)
ranks_along.check("groups", world_sizes=(1,))(places.groups_of_drawn_meshes)

make_mesh.check("mesh", world_sizes=(1, 2, 4))(places.meshes_have_tp_innermost)
make_mesh.check("rejections", world_sizes=(2, 3, 4))(places.other_sizes_are_rejected)

step_bytes.check("small meshes", world_sizes=(1,))(traffic.small_meshes)
step_bytes.check("step", world_sizes=(1,))(traffic.drawn_meshes)
leaving_bytes.check("plain hosts", world_sizes=(1,))(traffic.plain_hosts)
leaving_bytes.check("hosts", world_sizes=(1,))(traffic.drawn_hosts)

split_model.check("plain split", world_sizes=(2,))(training.plain_splits)
split_model.check("both axes", world_sizes=(1, 2, 4))(training.splits_combine)
split_model.check("schedules and models", world_sizes=(2, 4))(training.schedules_and_models)
split_model.check("wire", world_sizes=(2, 4))(training.split_layers_send_what_they_have_to)
split_model.check("memory", world_sizes=(4,))(training.each_stage_holds_its_layers)

Parallel3D.check("plain replicas", world_sizes=(2,))(training.plain_replicas)
Parallel3D.check("every mesh", world_sizes=(1, 2, 4))(training.every_mesh_trains)
Parallel3D.check("ZeRO-1", world_sizes=(1, 2, 4))(training.zero_1_trains)
Parallel3D.check("awkward models", world_sizes=(2, 4))(training.awkward_models_train)
Parallel3D.check("same bits", world_sizes=(2, 4))(training.replicas_stay_equal)
Parallel3D.check("wire", world_sizes=(2, 4))(training.each_axis_sends_what_it_has_to)
Parallel3D.check("memory", world_sizes=(4,))(training.each_rank_holds_its_part)
Parallel3D.check("rejections", world_sizes=(2, 3))(training.uneven_batches_are_rejected)

clip_grad_norm_.check("plain norm", world_sizes=(2,))(training.plain_norms)
clip_grad_norm_.check("every mesh's norm", world_sizes=(1, 2, 4))(training.norms_on_every_mesh)
clip_grad_norm_.check("ZeRO-1's norm", world_sizes=(1, 2, 4))(training.norms_with_zero_1)
clip_grad_norm_.check("awkward norms", world_sizes=(2, 4))(training.awkward_norms)
clip_grad_norm_.check("one element", world_sizes=(2, 4))(training.clipping_sends_one_element)

bubble_s.check("equal stages", world_sizes=(1,))(choices.equal_stages)
bubble_s.check("stages", world_sizes=(1,))(choices.drawn_stages)
choose_layouts.check("situations", world_sizes=(1,))(choices.the_three_situations)
choose_layouts.check("clusters", world_sizes=(1,))(choices.drawn_clusters)
choose_layouts.check("nothing fits", world_sizes=(1,))(choices.nothing_may_fit)

give_hints(
    {
        "no attribute 'clip_grad_norm_'": (
            "Hint: is the method in the last class named Parallel3D? And have you run a cell of 18.5 again after it?"
        ),
        **{
            f"'Parallel3D' object has no attribute '{name}'": (
                "Hint: have you run the cell of the constructor again? Then run the cells of Parallel3D after it, too."
            )
            for name in ("add_data_parallelism", "own_part", "gradients", "copies_of")
        },
        "got a second gradient for this parameter": (
            "Hint: each micro-batch has a backward of its own. Inside which context manager should they all run?"
        ),
        "does not match the number of": "Hint: does each group belong to the right axis?",
    },
    split_model,
    Parallel3D,
    clip_grad_norm_,
)
give_hints({"got <class 'int'> instead": "Hint: what is your sum on a rank without gradients?"}, clip_grad_norm_)
give_hints({"`sizes` was": "Hint: which line changes the caller's dictionary?"}, coordinates, ranks_along)
give_hints({"not a parameter of the model": "Hint: which model does parallelize() get?"}, split_model)
give_hints(
    {
        name: "Hint: what does your search return if nothing fits?"
        for name in ("empty sequence", "empty iterable", "list index out of range")
    },
    choose_layouts,
)
