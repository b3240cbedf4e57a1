"""Grading: `make grade SUBMISSIONS=dir`, or `python -m instructor.grade dir`.

command.py        the command line (started by __main__.py): grades what has changed, and survives Ctrl-C and SIGKILL
lms_zips.py       sorts a learning platform's download into folders (with archives.py and platforms.py)
finding.py        finds the students' notebooks; choice.py chooses which of several is graded
submissions.py    opens a notebook and extracts its exercise cells
tasks.py          lists the tasks of a lab, and computes the points of each answer
course.py         unpacks the course as students of one chapter have it, for the sandbox
sandbox.py        runs a process tree with limits, which sees only the files that it needs (with cgroup.py)
reader.py         reads a notebook inside the sandbox
judge.py          runs the instructor's checks on one student's code inside the sandbox (with assembly.py,
                  static_checks.py, safe_loading.py, store_proxy.py and limits.py)
drawing.py        runs the checks with drawn sizes, and measures what ranks send (with network_meter.py)
forked_server.py  forks the judge to start the fork server, from which the ranks are forked
isolation.py      gives each rank a user, files and memory of its own
machine_load.py   finds how many submissions this machine can grade at once, and lengthens deadlines while it is busy
grading.py        grades one submission: starts judges until every exercise has a verdict
records.py        keeps one record per student and lab, so that a grader that was killed can continue
policy.py         turns verdicts into grades: overrides, bonus, weights and deadlines
outputs.py        writes everything: the pages, with gradebook.py the tables, and with dashboard.py the overview
export.py         writes points into a platform's table (tables.py); returns.py packs feedback pages for a platform
gradescope.py     writes an autograder

What protects grading from cheating:

- The judge computes the right values, and no rank has enough data to compute them alone.
- Ranks share nothing but the network (isolation.py), so they can exchange values only over connections. The judge,
  which runs as another user, knows which connections belong to process groups, and how many bytes they carried
  (network_meter.py). store_proxy.py keeps values out of the process group's store, except for
  the texts of guards (`shared/guards/alarms.py`).
- static_checks.py reads the code before it runs. It rejects solutions that students do not have yet, the checks, and
  torch's ready-made wrappers in labs in which students write their own. It reports other names that a person should
  look at.
- Sizes and numbers of steps are drawn. At the end, one or two checks that have passed run again for longer. If one of
  them fails this time, the exercise earns nothing (drawing.py).

A notebook that works should lose no points. If an exercise uses an import, a helper or a constant from another
`%%ranks` cell, or if its answer is in another cell, assembly.py adds these definitions, by the same rules as
`shared/mine.py`. The lab's own cells stay as the instructor wrote them. The results of a probe travel as plain data,
in a notebook as well (`shared/checks/engine/parcel.py`), so both give the same verdict. If this machine fails, such as
by a full disk, nothing is graded, and the next run tries again. The ranks load the code before each probe, even if the
probe runs on fewer ranks, so code that only tries an exercise could fail there. Once the cells have been loaded,
assembly.py therefore leaves out assertions. If loading the cells calls collectives, assembly.py also leaves out all
other code that only tries an exercise. A later cell may redefine a helper of an exercise. If such an exercise fails
and has used little time, it is judged again without the later cells, and the better result counts.

Known limits: Python cannot isolate code within a process. What a student's own process reports, such as the order and
times of its collectives or the memory that was used, is believed, and nothing looks for code that forges it. Such code
still cannot forge values that ranks have to exchange, and the bytes on the network must agree with what the ranks
report to about 5%, or to 0.03 MB if little is sent. Each call may also send about 1 kB of headers. If an exercise needs
no communication, such as a formula of lab 05 or a rule of lab 17, code that reaches the modules of the checks can call
their reference. Code can hide a ready-made wrapper, or become wrong after more calls than the checks make. Ranks share
the processor, process ids and port numbers, and can pass a few hundred bytes per call through these. This is enough for
the numbers of lab 00, but not for the large tensors that grading draws in other checks. If a
system lacks control groups or cannot count the bytes, or if the grader is not root, the notes of each submission say
so. Submissions that are graded at once share the CPU, so one can slow down another, except with --jobs 1. If an
exercise fails, a later one that uses it is judged again with our own code for the failed one, but only if our solution
of the later one uses it, too. The code of the later exercise could then print our solution."""
