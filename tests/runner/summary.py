"""Write the report at the end of a run."""

from collections import Counter

from tests import mutation_results
from tests.runner.execution import Result

SLOWEST = 8


def summary(results: list[Result]) -> str:
    """Return the phases, the slowest tests, the mutants, the skipped tests, all failures and, last, the total."""
    parts = [phases(results), slowest(results), mutants(results), skipped(results), unstable(results)]
    parts.append(failures(results))
    return "\n\n".join([*filter(None, parts), total(results)])


def phases(results: list[Result]) -> str:
    lines = [f"{'phase':<10} {'seconds':>8}  result"]
    for result in results:
        verdict = f"failed: {result.problem}" if result.problem else "passed"
        lines.append(f"{result.name:<10} {result.seconds:>8.1f}  {verdict}")
    return "\n".join(lines)


def slowest(results: list[Result]) -> str:
    tests = sorted((test for result in results for test in result.tests.done), key=lambda test: -test.seconds)
    lines = [f"{test.seconds:>8.1f} s  {test.name}" for test in tests[:SLOWEST]]
    return "\n".join(["Slowest tests:", *lines]) if lines else ""


def mutants(results: list[Result]) -> str:
    return "\n\n".join(str(mutation_results.by_chapter(result.mutants)) for result in results if result.mutants)


def skipped(results: list[Result]) -> str:
    reasons = Counter(
        test.reason for result in results for test in result.tests.tests.values() if test.verdict == "skipped"
    )
    lines = [f"{count:>8}  {reason}" for reason, count in reasons.most_common()]
    return "\n".join(["Skipped:", *lines]) if lines else ""


def unstable(results: list[Result]) -> str:
    lines = [f"    {test.name}\n        {test.reason}" for result in results for test in result.tests.unstable]
    return "\n".join(["Failed, then passed when they ran again, alone. Find out why:", *lines]) if lines else ""


def failures(results: list[Result]) -> str:
    lines = []
    for result in results:
        if result.problem:
            lines.append(f"{result.name}: {result.problem}")
        lines += [f"    {test.name}\n        {test.reason}" for test in result.tests.failed]
    return "\n".join(["Failures:", *lines]) if lines else ""


def total(results: list[Result]) -> str:
    """Return the total in its fixed form, `N passed, N failed[, N skipped]`."""
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result.counts)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return f"{counts['passed']} passed, {counts['failed']} failed{skipped}"
