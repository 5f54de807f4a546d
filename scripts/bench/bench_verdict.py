"""Measure the processor time of a check, a check against a baseline, and mending, as multiples of classifying.

    python -m scripts.bench.bench_verdict ../shared/data/caltech --weights mobilenet_v2.pth

Each command runs once, as a user would start it, and its time includes starting Python and reading the pictures.
Processor time depends less than the clock on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from camkit.background.check import plan_check
from camkit.models import load_model
from scripts.bench.bench_check import classify


def processor_seconds(command: list[str]) -> tuple[float, int]:
    """Run a command, and return the processor time of it and its children, and its exit code."""
    before = os.times()
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system, code


def main() -> None:
    """Run the commands one after the other and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path, help="a folder with a folder for each class")
    parser.add_argument("--model", default="mobilenet_v2")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--class-map", type=Path, help="default: to_imagenet.json in the folder")
    parser.add_argument("--plain", action="store_true", help="only classify")
    given = parser.parse_args()
    class_map = given.class_map or given.data / "to_imagenet.json"
    if given.plain:
        model = load_model(given.model, weights=given.weights)
        plan = plan_check(model, given.data, class_map=class_map)
        classify(plan)
        print(len(plan.data.items))
        return
    with tempfile.TemporaryDirectory() as folder:
        camkit = [sys.executable, "-m", "camkit"]
        of_model = ["--model", given.model, "--weights", given.weights, "--class-map", str(class_map), "--quiet"]
        check = [*camkit, "check", str(given.data), *of_model]
        reports = [f"{folder}/{name}" for name in ("first", "second")]
        baseline = ["--baseline", f"{reports[0]}/report.json"]
        commands = {
            "classify": [sys.executable, "-m", "scripts.bench.bench_verdict", *sys.argv[1:], "--plain"],
            "check": [*check, "--out", reports[0]],
            "check again, against a baseline": [*check, "--out", reports[1], *baseline],
            "mend": [*camkit, "mend", str(given.data), *of_model, "--out", f"{folder}/mended.pth", "--force"],
        }
        print("| command | seconds of processor time | x classify | exit code |\n|---|---:|---:|---:|")
        plain = 0.0
        for name, command in commands.items():
            seconds, code = processor_seconds(command)
            plain = plain or seconds
            print(f"| {name} | {seconds:.0f} | {seconds / plain:.1f} | {code} |", flush=True)


if __name__ == "__main__":
    main()
