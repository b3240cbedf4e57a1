"""The implementation of `make gpu`, or `python -m tests.gpu`: tests that need a GPU, and one page with the results.

steps         the steps and their parts on a machine: what runs there, and what is skipped and why
running       runs a part with a deadline, and reads its results
supervisor    runs the command of a part, and ends every process that it leaves behind
results       the results of a part and of the whole run, and how the programs below report theirs
page          writes the results as JSON, as a Markdown page and as a figure
figure        draws the figure

starting      a program: starts ranks, runs cells on them, lets one hang, and stops them
semantics     a program: compares how NCCL behaves towards the host with what its simulation claims

The programs run in processes of their own. All other modules need nothing but Python, so the page is written even if
PyTorch cannot be imported.
"""
