"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import contextlib

from solutions import checkpoints


def each_alone_where_nothing_is_sharded():
    """Writes without coordination if nothing is sharded: all ranks write the same files, even while rank 0 renames
    their folder.

    caught by: save_checkpoint · all or nothing
    """

    def save_checkpoint(folder, step, model, optimizer):
        if any(hasattr(each, "placements") for each in model.parameters()):
            checkpoints.save_checkpoint(folder, step, model, optimizer)
            return
        whole, half = folder / f"step_{step}", folder / f"step_{step}.half"
        for left in (whole, half):
            checkpoints.shutil.rmtree(left, ignore_errors=True)
        checkpoints.dist.barrier()
        model_state, optimizer_state = checkpoints.get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": step}
        checkpoints.dcp.save(state, checkpoint_id=half, no_dist=True)
        if checkpoints.dist.get_rank() == 0:
            half.rename(whole)
        checkpoints.dist.barrier()


def loads_learning_rates_only():
    """Restores only the learning rate of each group's settings.

    caught by: load_checkpoint · resumed
    """

    from solutions.checkpoints import newest_checkpoint  # noqa: F401

    def get_state_dict(model, optimizer):
        model_state, optimizer_state = checkpoints.get_state_dict(model, optimizer)
        return {"model": model_state, "moments": optimizer_state["state"]}, optimizer_state["param_groups"]

    def save_checkpoint(folder, step, model, optimizer):
        whole, half = folder / f"step_{step}", folder / f"step_{step}.half"
        if checkpoints.dist.get_rank() == 0:
            for left in (whole, half):
                checkpoints.shutil.rmtree(left, ignore_errors=True)
        checkpoints.dist.barrier()
        state, _ = get_state_dict(model, optimizer)
        rates = [group["lr"] for group in optimizer.param_groups]
        checkpoints.dcp.save(state | {"rates": rates, "step": step}, checkpoint_id=half)
        if checkpoints.dist.get_rank() == 0:
            half.rename(whole)
        checkpoints.dist.barrier()

    def load_checkpoint(path, model, optimizer):
        state, groups = get_state_dict(model, optimizer)
        state |= {"rates": [0.0 for _ in groups], "step": 0}
        checkpoints.dcp.load(state, checkpoint_id=path)
        optimizer_state = {"state": state["moments"], "param_groups": groups}
        checkpoints.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state)
        for group, rate in zip(optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate
        return state["step"]


def loads_one_learning_rate():
    """Saves the first group's learning rate only and restores it for all groups.

    caught by: load_checkpoint · resumed
    """

    from solutions.checkpoints import newest_checkpoint  # noqa: F401

    def get_state_dict(model, optimizer):
        model_state, optimizer_state = checkpoints.get_state_dict(model, optimizer)
        return {"model": model_state, "moments": optimizer_state["state"]}, optimizer_state["param_groups"]

    def save_checkpoint(folder, step, model, optimizer):
        whole, half = folder / f"step_{step}", folder / f"step_{step}.half"
        if checkpoints.dist.get_rank() == 0:
            for left in (whole, half):
                checkpoints.shutil.rmtree(left, ignore_errors=True)
        checkpoints.dist.barrier()
        state, _ = get_state_dict(model, optimizer)
        rates = optimizer.param_groups[0]["lr"]
        checkpoints.dcp.save(state | {"rates": rates, "step": step}, checkpoint_id=half)
        if checkpoints.dist.get_rank() == 0:
            half.rename(whole)
        checkpoints.dist.barrier()

    def load_checkpoint(path, model, optimizer):
        state, groups = get_state_dict(model, optimizer)
        state |= {"rates": 0.0, "step": 0}
        checkpoints.dcp.load(state, checkpoint_id=path)
        optimizer_state = {"state": state["moments"], "param_groups": groups}
        checkpoints.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state)
        for group in optimizer.param_groups:
            group["lr"] = state["rates"]
        return state["step"]


def saves_in_the_foreground():
    """Saves when it is called, and training waits.

    caught by: BackgroundSaver · background
    """

    from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401

    class BackgroundSaver:
        def save(self, folder, step, model, optimizer):
            checkpoints.save_checkpoint(folder, step, model, optimizer)

        def wait(self):
            pass


def swallows_a_failure_of_the_thread():
    """Ignores what the future raises, so nobody learns that nothing was saved.

    caught by: BackgroundSaver · failure
    """

    from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401

    class BackgroundSaver(checkpoints.BackgroundSaver):
        def wait(self):
            with contextlib.suppress(checkpoints.dcp.CheckpointException):
                super().wait()


def saves_two_at_a_time():
    """Does not wait for the save before, which is then never completed.

    caught by: BackgroundSaver · one at a time
    """

    from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401

    class BackgroundSaver(checkpoints.BackgroundSaver):
        def save(self, folder, step, model, optimizer):
            self._pending = None
            super().save(folder, step, model, optimizer)
