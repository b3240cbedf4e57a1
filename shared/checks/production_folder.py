"""To be written."""


def the_largest_step_is_found(attempt):
    pass


def what_was_left_goes_first(attempt):
    pass
