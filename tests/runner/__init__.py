"""What `python -m tests.run` is made of.

calibration   how busy the machine is, and how many workers it can feed
phases        the commands, and which tests of them were asked for
plugin        inside pytest: tells the runner about each test, and cleans up after one that ran out of time
results       what became of the tests, read from what the plugin tells
execution     runs a phase's commands, shows progress, ends what hangs
progress      the line that says what is running and how much is left
record        the last run, kept in build/tests/: which tests failed, and how long each one took
summary       the report at the end
"""
