"""Operations on sets of time intervals, given as lists of (began_s, ended_s)."""

Intervals = list[tuple[float, float]]


def merge(intervals: Intervals) -> Intervals:
    """Return sorted, disjoint intervals that cover the same time."""
    merged: Intervals = []
    for began, ended in sorted(intervals):
        if merged and began <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(ended, merged[-1][1]))
        else:
            merged.append((began, ended))
    return merged


def subtract(intervals: Intervals, removed: Intervals) -> Intervals:
    """Return the parts of the intervals that lie in none of the `removed` ones."""
    remaining, holes, first = [], merge(removed), 0
    for start, end in merge(intervals):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        hole = first
        while hole < len(holes) and holes[hole][0] < end:
            if start < holes[hole][0]:
                remaining.append((start, holes[hole][0]))
            start = holes[hole][1]
            hole += 1
        if start < end:
            remaining.append((start, end))
    return remaining


def length_s(intervals: Intervals) -> float:
    """Return the time that the intervals cover, counting overlaps once."""
    return sum(ended - began for began, ended in merge(intervals))


def rows(intervals: Intervals) -> list[int]:
    """Put each interval, in order of its beginning, into the first free row. Returns a row index for each interval."""
    free_at: list[float] = []
    row_of = {}
    for index in sorted(range(len(intervals)), key=lambda index: intervals[index]):
        began, ended = intervals[index]
        row = next((row for row, free in enumerate(free_at) if free <= began), len(free_at))
        free_at[row : row + 1] = [ended]
        row_of[index] = row
    return [row_of[index] for index in range(len(intervals))]
