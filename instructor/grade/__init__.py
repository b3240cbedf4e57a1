"""Grading: `make grade SUBMISSIONS=dir`, or `python -m instructor.grade dir`.

submissions.py   finds the students' notebooks and extracts their exercise cells
tasks.py         lists the tasks of a lab, and computes the points of each answer
course.py        unpacks the course as students of one chapter have it, for the sandbox
sandbox.py       runs a process tree with limits, which sees only the files that it needs
judge.py         runs inside the sandbox: the instructor's checks on one student's code (with screen.py, guard.py,
                 fingerprints.py and limits.py)
grading.py       grades one submission: starts judges until every exercise has a verdict
records.py       keeps one record per student and lab, so that a grader that was killed can continue
gradebook.py     writes all records as tables, and for Gradescope; feedback.py writes a page per student

Known limits: a student's code runs in the process that counts its collectives and bytes. Code that is written to
cheat can change the counts and hide the change from fingerprints.py, send data through files, or wrap torch's own
class. It cannot forge the right values. The column "look at" of the index page names code that could do such things,
but it misses code that hides them well. Submissions share the CPU: with --jobs above 1, one can slow down another.
"""
