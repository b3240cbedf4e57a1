"""Checks for chapter 12: checkpoints that no crash can spoil, and that any number of ranks can load."""

from shared.checks.checkpoints import crash, folder, saved, shards
from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints

newest_checkpoint = Exercise("12.1", "newest_checkpoint", optional=True)
save_checkpoint = Exercise("12.2", "save_checkpoint", optional=True)  # with newest_checkpoint beside it
load_checkpoint = Exercise("12.3", "load_checkpoint", optional=True)  # with both others beside it

_LOOK_AT_NOTHING = "Look at: what does a search return that finds nothing?"
_LOOK_AT_LOAD = "Look at: what does torch.distributed.checkpoint.load fill?"
IN_CHECKPOINTS = {
    "Directory not empty": "Look at: what is in the way of the rename?",
    "mixed torch.Tensor and DTensor": "Look at: which functions take and return a state for any number of ranks?",
    "Missing key in checkpoint state_dict: optimizer": "Look at: of two kinds of an optimizer's state, which names a "
    "parameter by its number, which by its name, and which of them is saved?",
    "Missing key in checkpoint state_dict": "Look at: does what load fills have the same form as what was saved?",
    ".half' -> ": "Look at: which ranks rename it?",
    "KeyError: 'model'": _LOOK_AT_LOAD,
    "KeyError: 'optimizer'": _LOOK_AT_LOAD,
    "KeyError: 'step'": _LOOK_AT_LOAD,
    "/missing'": "Look at: what is there before the first checkpoint?",
    "invalid literal for int": "Look at: which names can save_checkpoint have given?",
    "empty sequence": _LOOK_AT_NOTHING,
    "empty iterable": _LOOK_AT_NOTHING,
}

newest_checkpoint.check("newest", world_sizes=(1,))(folder.the_largest_step_is_found)

save_checkpoint.check("own shard", world_sizes=(4,))(shards.each_writes_its_shard)
save_checkpoint.check("all or nothing", world_sizes=(2, 4))(crash.nobody_sees_a_part)
save_checkpoint.check("meeting", world_sizes=(3,))(crash.all_come_back_after_the_rename)
save_checkpoint.check("left behind", world_sizes=(1, 2))(folder.what_was_left_goes_first)
save_checkpoint.check("failure", world_sizes=(1, 3))(crash.a_failure_leaves_the_last_one)

load_checkpoint.check("resumed", world_sizes=(1, 2, 4))(saved.any_number_of_ranks_goes_on)
load_checkpoint.check("went on", world_sizes=(1, 3))(saved.training_goes_back)

give_hints(IN_CHECKPOINTS, newest_checkpoint, save_checkpoint, load_checkpoint)
