"""To be written."""


def nobody_sees_a_part(attempt):
    pass


def a_failure_leaves_the_last_one(attempt):
    pass


def all_come_back_after_the_rename(attempt):
    pass


def each_writes_its_part(attempt):
    pass
