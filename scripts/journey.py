"""Count the calls of camkit's functions on four journeys, and the files that the functions are in.

    python scripts/journey.py
    python scripts/journey.py file tensor
    python scripts/journey.py --list file

Whoever wants to know how a picture becomes a heatmap follows these calls. A call is an entry into a function, also into
a generator that goes on; lambdas, comprehensions, generator expressions and the bodies of classes do not count.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import torchvision

import camkit

PACKAGE = Path(camkit.__file__).parent

PRODUCTS = (
    "background",
    "demo",
    "inspect",
    "metrics",
    "scale",
    "sentences",
    "tensorboard",
)
"""The packages that explaining one picture needs nothing of."""

AIMS = {"file": (220, 22), "tensor": (150, 20), "check": (None, 70), "shell": (None, None)}
"""How many calls and files each journey may have."""

Calls = Counter[tuple[str, str]]
"""How often each function was called, by its file and its qualified name."""


def traced(journey: Callable[[], object]) -> Calls:
    """Run a journey, and count the calls of camkit's functions in all threads that it starts."""
    calls: Calls = Counter()
    start = f"{PACKAGE}/"

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")  # not a class's body
        if event == "call" and function and code.co_filename.startswith(start):
            calls[code.co_filename.removeprefix(start), code.co_qualname] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        journey()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def of_a_file() -> Calls:
    """Count the calls of a warm Explainer for a picture in a file."""
    path = next(iter(camkit.scenes.scene_paths().values()))
    return _warm(camkit.Explainer("demo-fair"), path)


def of_a_tensor() -> Calls:
    """Count the calls of a warm Explainer for a tensor and a ResNet-18."""
    torch.manual_seed(0)
    return _warm(camkit.Explainer(torchvision.models.resnet18().eval(), method="gradcam"), torch.zeros(3, 224, 224))


def _warm(explainer: camkit.Explainer, picture: Path | torch.Tensor) -> Calls:
    for _ in range(2):
        explainer(picture)
    return traced(lambda: explainer(picture))


def of_a_check() -> Calls:
    """Count the calls of a check of the demo's network on 32 drawn scenes."""
    from camkit.demo.scenes import write_scenes  # noqa: PLC0415 - only this journey needs it

    with tempfile.TemporaryDirectory() as folder:
        pictures = write_scenes(Path(folder), per_class=8)
        return traced(lambda: camkit.check("demo-fair", pictures, out=Path(folder) / "report"))


_IN_THE_SHELL = """
import json, sys
import journey
from camkit.cli import main

codes = []
calls = journey.traced(lambda: codes.append(main(sys.argv[1:])))
names = sorted(name for name in sys.modules if name.startswith("camkit."))
print(json.dumps([codes, [[*key, count] for key, count in calls.items()], names]))
"""


def of_the_shell() -> tuple[Calls, set[str]]:
    """Count the calls of the command that explains one picture, and name the products that it imports."""
    path = next(iter(camkit.scenes.scene_paths().values()))
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(path), "--model", "demo-fair", "--out", f"{folder}/heat.png", "--quiet"]
        call = [sys.executable, "-W", "ignore", "-c", _IN_THE_SHELL, *arguments]
        done = subprocess.run(call, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    codes, counts, names = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0], done.stdout
    calls: Calls = Counter({(file, name): count for file, name, count in counts})
    return calls, {name.split(".")[1] for name in names} & set(PRODUCTS)


JOURNEYS: dict[str, tuple[str, Callable[[], Calls]]] = {
    "file": ("warm Explainer, a file", of_a_file),
    "tensor": ("warm Explainer, a tensor, ResNet-18", of_a_tensor),
    "check": ("check of 32 pictures", of_a_check),
    "shell": ("camkit PICTURE in the shell", lambda: of_the_shell()[0]),
}
"""The title of each journey, and the function that counts its calls."""


def files_of(calls: Calls) -> set[str]:
    """Return the files that the called functions are in."""
    return {file for file, _ in calls}


def row(name: str) -> str:
    """Return the row of a journey for the table."""
    title, journey = JOURNEYS[name]
    calls, (most_calls, most_files) = journey(), AIMS[name]
    values = (title, calls.total(), most_calls or "", len(files_of(calls)), most_files or "")
    return f"| {' | '.join(map(str, values))} |"


def listing(calls: Calls) -> str:
    """Return all files and functions with their calls, the most called first."""
    by_file: Counter[str] = Counter()
    for (file, _), count in calls.items():
        by_file[file] += count
    lines = []
    for file, total in by_file.most_common():
        lines.append(f"{total:5} {file}")
        of_file = Counter({name: count for (place, name), count in calls.items() if place == file})
        lines += [f"      {count:5} {name}" for name, count in of_file.most_common()]
    return "\n".join(lines)


def main() -> None:
    """Print a table, or the calls of one journey."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("journeys", nargs="*", help=f"of {', '.join(JOURNEYS)}; all if none is given")
    parser.add_argument("--list", choices=list(JOURNEYS), help="list the calls of this journey instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.list:
        print(listing(JOURNEYS[options.list][1]()))
        return
    print("| journey | calls | aim | files | aim |\n|---|---:|---:|---:|---:|")
    for name in options.journeys or JOURNEYS:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
