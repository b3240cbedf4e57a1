"""Checks for chapter 12: checkpoints that survive crashes, and that any number of ranks can load."""

from shared.checks.checkpoints import background, crash, folder, saved
from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints

newest_checkpoint = Exercise("12.1", "newest_checkpoint")
save_checkpoint = Exercise("12.2", "save_checkpoint")  # needs newest_checkpoint in the same file
load_checkpoint = Exercise("12.3", "load_checkpoint")  # needs both others in the same file
BackgroundSaver = Exercise("12.4", "BackgroundSaver")  # needs the functions that find and load

_HINT_ON_NOTHING = "Hint: what does your search return if it finds nothing?"
_HINT_ON_LOAD = "Hint: what must the dict contain before torch.distributed.checkpoint.load() can fill it?"
IN_CHECKPOINTS = {
    "Directory not empty": "Hint: what already exists at the target of the rename?",
    "mixed torch.Tensor and DTensor": (
        "Hint: which functions get and set a state dict that any number of ranks can load?"
    ),
    "Missing key in checkpoint state_dict: optimizer": "Hint: one kind of optimizer state lists parameters by index, "
    "another by name. Which kind do you save, and which kind do you load into?",
    "Missing key in checkpoint state_dict": (
        "Hint: does the state that you load into have the same structure as the one that you saved?"
    ),
    ".half' -> ": "Hint: into which folder do the ranks write, and which rank renames it?",
    "KeyError: 'model'": _HINT_ON_LOAD,
    "KeyError: 'optimizer'": _HINT_ON_LOAD,
    "KeyError: 'step'": _HINT_ON_LOAD,
    "/missing'": "Hint: does the folder exist before the first checkpoint is saved?",
    "invalid literal for int": "Hint: must every name that begins with step_ end with a number?",
    "empty sequence": _HINT_ON_NOTHING,
    "empty iterable": _HINT_ON_NOTHING,
}

_HINT_ON_RENAME = "Hint: when you rename the folder, have all ranks finished writing, and has it been renamed before?"
IN_BACKGROUND = {
    ".half' -> ": _HINT_ON_RENAME,
    "metadata is None": _HINT_ON_RENAME,
    "SIGABRT": "Hint: in which process group does the thread communicate while training calls collectives?",
}

newest_checkpoint.check("newest", world_sizes=(1,))(folder.the_largest_step_is_found)

save_checkpoint.check("own shard", world_sizes=(2, 4))(saved.each_writes_its_shard)
save_checkpoint.check("all or nothing", world_sizes=(2, 4), once=True)(crash.partial_checkpoints_are_never_visible)
save_checkpoint.check("all ranks return", world_sizes=(3,))(crash.every_rank_returns_after_the_rename)
save_checkpoint.check("leftovers", world_sizes=(1, 2), once=True)(folder.leftovers_are_removed_first)
save_checkpoint.check("killed again", world_sizes=(1,), once=True)(folder.a_kill_while_removing_is_survived)
save_checkpoint.check("failure", world_sizes=(1, 3), once=True)(crash.a_failure_keeps_the_previous_checkpoint)

load_checkpoint.check("plain", world_sizes=(2,))(saved.a_plain_model_resumes)
load_checkpoint.check("resumed", world_sizes=(1, 2, 4))(saved.any_number_of_ranks_resumes)
load_checkpoint.check("earlier checkpoint", world_sizes=(1, 3))(saved.training_can_go_back)

BackgroundSaver.check("plain", world_sizes=(2,))(background.it_saves)
BackgroundSaver.check("own group", world_sizes=(2,))(background.the_saves_have_their_own_group)
BackgroundSaver.check("background", world_sizes=(2, 4))(background.training_goes_on)
BackgroundSaver.check("not early", world_sizes=(3,), once=True)(background.unwritten_checkpoints_are_never_visible)
BackgroundSaver.check("all ranks wait", world_sizes=(3,))(background.every_rank_waits_for_the_rename)
BackgroundSaver.check("one at a time", world_sizes=(2,), once=True)(background.one_save_at_a_time)
BackgroundSaver.check("failure", world_sizes=(1, 3), once=True)(background.a_failure_is_reported)

give_hints(IN_CHECKPOINTS, newest_checkpoint, save_checkpoint, load_checkpoint)
give_hints(IN_CHECKPOINTS | IN_BACKGROUND, BackgroundSaver)
