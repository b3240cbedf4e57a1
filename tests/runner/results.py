"""Collect the results of a phase's tests from the plugin's reports."""

import json
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """The outcome of one test so far."""

    name: str  # pytest's node id
    verdict: str = "passed"
    seconds: float = 0.0  # including setup and teardown
    reason: str = ""
    properties: dict[str, str] = field(default_factory=dict)


@dataclass
class Results:
    """All tests of a phase: waiting, running and done."""

    collected: list[str] = field(default_factory=list)
    running: dict[str, float] = field(default_factory=dict)  # start of each running test, by time.monotonic()
    tests: dict[str, Outcome] = field(default_factory=dict)  # those that have started
    unstable: list[Outcome] = field(default_factory=list)  # failures of those that passed when run again

    def take(self, line: str) -> None:
        """Process one event."""
        event = json.loads(line)
        if "collected" in event:
            self.collected = event["collected"]
        elif "started" in event:
            self.running[event["started"]] = time.monotonic()
        elif "finished" in event:
            self.running.pop(event["finished"], None)
        else:
            self._take_report(event)

    def _take_report(self, event: dict) -> None:
        test = self.tests.setdefault(event["report"], Outcome(event["report"]))
        test.seconds += event["seconds"]
        test.properties |= event["properties"]
        if event["outcome"] != "passed" and test.verdict != "failed":
            test.verdict, test.reason = event["outcome"], event["reason"]

    def settle(self, again: "Results") -> None:
        """Replace failures by the outcomes of those tests that passed when they ran again."""
        for failed in self.failed:
            second = again.tests.get(failed.name)
            if second is not None and second.verdict == "passed":
                self.unstable.append(failed)
                self.tests[failed.name] = second

    @property
    def done(self) -> list[Outcome]:
        return [test for name, test in self.tests.items() if name not in self.running]

    @property
    def failed(self) -> list[Outcome]:
        return [test for test in self.tests.values() if test.verdict == "failed"]

    @property
    def counts(self) -> Counter[str]:
        """Return how many tests passed, failed and were skipped."""
        return Counter(test.verdict for test in self.tests.values())
