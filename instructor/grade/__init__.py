"""Grading: `make grade SUBMISSIONS=dir`, or `python -m instructor.grade dir`.

submissions.py   what students handed in, found and taken apart
tasks.py         what a lab asks for, and how many points each answer gets
sandbox.py       a process tree with limits, which sees nothing of the machine that it does not need
judge.py         what runs in there: the instructor's checks on one student's pieces (screen.py, guard.py help)
records.py       one record per student and lab; a grader that was killed goes on where it was
gradebook.py     all records as a table, and for Gradescope; feedback.py: a page per student

What it cannot do: a piece runs in the process that counts its messages and bytes, so who sets out to can rewrite the
counts, hide that from fingerprints.py, or send data through files, as who wraps torch's own class can pass by it. Right
values cannot be forged so. The column "look at" of all grades names code that could be up to it; hidden well, it is not
named. CPU time is not shared out: with --jobs above 1, one submission can slow another down.
"""
