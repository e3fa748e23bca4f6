"""Prints which requirements of setup.py this Python lacks, one a line; exits 1 if there are any. Needs no package itself."""

import argparse
import ast
import importlib.metadata
import sys
from pathlib import Path

SETUP = Path(__file__).parent.parent / "setup.py"


def requirements(extras: list[str], setup: Path = SETUP) -> list[str]:
    """The package's requirement strings and those of `extras`, read from the lists in setup.py without running it."""
    values = {}
    for statement in ast.parse(setup.read_text()).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id in ("REQUIREMENTS", "EXTRAS"):
            values[statement.targets[0].id] = ast.literal_eval(statement.value)
    unknown = set(extras) - set(values["EXTRAS"])
    if unknown:
        raise ValueError(f"no extra named {sorted(unknown)} in setup.py: choose from {sorted(values['EXTRAS'])}")
    return values["REQUIREMENTS"] + [line for extra in extras for line in values["EXTRAS"][extra]]


def missing(lines: list[str]) -> list[str]:
    """Those of `lines` that no installed distribution satisfies, each with the version found."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        try:
            from pip._vendor.packaging.requirements import Requirement
        except ModuleNotFoundError:
            return lines  # an environment without even `packaging` has none of ours
    lacking = []
    for line in lines:
        requirement = Requirement(line)
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(line)
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            lacking.append(f"{line} (found {found})")
    return lacking


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--extra", action="append", default=[], help="an extra of setup.py to include (may be repeated)")
    parser.add_argument("--only", help="look at this one package alone")
    arguments = parser.parse_args()
    lines = requirements(arguments.extra)
    if arguments.only:
        lines = [line for line in lines if line.partition(">=")[0] == arguments.only]
    lacking = missing(lines)
    print("\n".join(lacking), end="\n" if lacking else "")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
