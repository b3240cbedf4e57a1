"""Grading: `make grade SUBMISSIONS=dir`, or `python -m instructor.grade dir`.

arrivals.py      sorts a learning platform's zip file into folders
submissions.py   finds the students' notebooks and extracts their exercise cells
tasks.py         lists the tasks of a lab, and computes the points of each answer
course.py        unpacks the course as students of one chapter have it, for the sandbox
sandbox.py       runs a process tree with limits, which sees only the files that it needs (with cgroup.py)
reader.py        reads a notebook inside the sandbox
judge.py         runs inside the sandbox: the instructor's checks on one student's code (with screen.py, guard.py,
                 gate.py, fingerprints.py and limits.py)
grading.py       grades one submission: starts judges until every exercise has a verdict
records.py       keeps one record per student and lab, so that a grader that was killed can continue
policy.py        turns verdicts into grades: overrides, bonus, weights and deadlines
outputs.py       writes everything: gradebook.py the tables, feedback.py the pages, dashboard.py the overview (with
                 likeness.py)
export.py        writes points into a platform's table; gradescope.py writes an autograder

Known limits: a student's code runs in the process that counts its collectives. Code that is written to cheat can change
these counts and hide the change from fingerprints.py. So the judge, which is another user's process, compares them with
what the sandbox's network interface carried (`shared/checks/engine/outside.py`), and gate.py keeps values out of the
process group's store. Forged calls are found where much is sent, as by the large models on two ranks. They are not
found where ranks exchange less than about 0.03 MB. Code can also wrap torch's own class. It cannot forge the right
values. But ranks share the files of their sandbox, so values can travel without any collective, which only costs the
points of the checks that count bytes. The index page names code that could do such things, but it misses code that
hides them well. Where a system lacks control groups or a count of bytes, or the grader is not root, the notes of each
submission say so. Submissions share the CPU: with --jobs above 1, one can slow down another. An exercise that fails is
replaced by our own code when a later one that uses it is judged again. The later code could print that solution.
"""
