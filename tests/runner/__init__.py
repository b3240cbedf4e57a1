"""The implementation of `python -m tests.run`.

calibration   measures how busy the machine is, and how many workers it can run
phases        builds the commands of each phase, for the chosen tests
plugin        runs inside pytest: reports each test to the runner, and cleans up after one that ran out of time
results       collects the outcome of each test from the plugin's reports
execution     runs a phase's commands, shows progress, and kills commands that hang
progress      writes the line that says what is running and how much is left
record        keeps the last run in build/tests/: which tests failed, and how long each one took
summary       writes the report at the end
"""
