"""Compares camkit with plain inference and with grad-cam, torchcam and captum: time, memory and the maps themselves.

    python -m scripts.bench.bench_peers --json bench.json --markdown scripts/results/benchmarks.md
    python -m scripts.bench.bench_peers --device cuda --batch 256 --markdown scripts/results/benchmarks.md

Time: all contenders take turns in one process, round after round, so that a slow moment of the machine affects all of
them. Memory: each contender gets a fresh process; on a CPU this needs Linux, whose kernel records the peak. All get the
same images, the same class for each image and the same layer, and return one map of the input's size per image.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.functional import interpolate

import camkit
from scripts.bench.timing import Run, network, processor, quartiles, reset_peak, resident, table, take_turns

PEERS = {"grad-cam": "pytorch_grad_cam", "torchcam": "torchcam", "captum": "captum"}

CPU_BATCHES = {"vgg16": 4}
"""The most images for models whose full graph, which the peers keep, takes gigabytes of memory."""

STEADY_HEAP = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Makes glibc return freed tensors to the system, so that the resident set shows what is really in use."""

COLUMNS = (
    ("title", "", ""),
    ("ms", "ms", ".1f"),
    ("time", "x plain", ".2f"),
    ("low", "from", ".2f"),
    ("high", "to", ".2f"),
    ("mib", "extra MiB", ".0f"),
    ("memory", "x plain", ".2f"),
    ("correlation", "correlation", ".5f"),
    ("least", "least", ".5f"),
    ("empty", "empty", "d"),
)
"""The key in a contender's results, the heading and the format of each column."""

NOTE = """\
"ms" is the median of the rounds. "x plain" is the median of the ratios to plain inference within each round, and \
"from" and "to" are their quartiles. "Extra MiB" is the most memory that one call holds beyond what its process held \
before, measured by {how}. "Correlation" is Pearson's, with camkit's map: the mean over the images, and the least. \
Every map is cut at zero on the grid and enlarged bilinearly; its scale does not matter. "Empty" counts maps without a \
positive value. The first call on a model includes the choice of the layer. On a CPU camkit gives the model its images \
with the channels last. Plain inference can do that too; see the second row."""


@dataclass(frozen=True)
class Case:
    """Everything that a process needs to build the same model and images."""

    model: str
    batch: int
    size: int
    device: str
    threads: int
    layer: str = ""
    classes: tuple[int, ...] = ()


def pictures(count: int, size: int) -> Tensor:
    """Return seeded images (N, 3, H, W): large shapes, so that maps vary over the image, and a little noise."""
    generator = torch.Generator().manual_seed(count)
    shapes = interpolate(torch.randn(count, 3, 7, 7, generator=generator), (size, size), mode="bilinear")
    return shapes + 0.1 * torch.randn(count, 3, size, size, generator=generator)


def load(case: Case) -> tuple[nn.Module, Tensor]:
    """Build the model, with seeded weights and batch norm statistics of four images, and its images (N, 3, H, W).

    Without these statistics the features of a random MobileNetV3 shrink to 1e-10, and a peer's epsilon blanks its maps.
    """
    torch.set_num_threads(case.threads)
    module = network(case.model)
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    for norm in norms:
        norm.train().momentum = None
    with torch.no_grad():
        module(pictures(4, case.size))
    for norm in norms:
        norm.eval()
    return module.to(case.device), pictures(case.batch, case.size).to(case.device)


@contextmanager
def _plain(
    _: Case, module: nn.Module, images: Tensor, *, bf16: bool = False, channels_last: bool = False
) -> Iterator[Run]:
    images = images.contiguous(memory_format=torch.channels_last) if channels_last else images
    with torch.inference_mode(), torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        yield lambda: module(images)


@contextmanager
def _camkit(case: Case, module: nn.Module, images: Tensor, *, fresh: bool = False, **options: Any) -> Iterator[Run]:
    classes = torch.tensor(case.classes, device=images.device)[:, None]
    own = copy.deepcopy(module) if fresh else module
    settings = {"method": "gradcam", "target_layer": case.layer, "spread": "even"} | options  # the peers' is even, too
    settings.setdefault("target", lambda output: output.gather(1, classes)[:, 0])
    yield lambda: camkit.explain(own, images, batch_size=len(images), **settings)


@contextmanager
def _grad_cam(case: Case, module: nn.Module, images: Tensor) -> Iterator[Run]:
    from pytorch_grad_cam import GradCAM  # noqa: PLC0415 - a peer is imported only while it is measured
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget  # noqa: PLC0415

    targets = [ClassifierOutputTarget(index) for index in case.classes]
    with GradCAM(module, [module.get_submodule(case.layer)]) as cam:
        yield lambda: cam(images, targets)
    module.zero_grad(set_to_none=True)


@contextmanager
def _torchcam(case: Case, module: nn.Module, images: Tensor) -> Iterator[Run]:
    from torchcam.methods import GradCAM  # noqa: PLC0415

    def run() -> Tensor:
        grids = extractor(list(case.classes), module(images))[0]
        return interpolate(grids[:, None], images.shape[2:], mode="bilinear")[:, 0].cpu()

    with GradCAM(module, case.layer) as extractor:
        yield run


@contextmanager
def _captum(case: Case, module: nn.Module, images: Tensor) -> Iterator[Run]:
    from captum.attr import LayerAttribution, LayerGradCam  # noqa: PLC0415

    method = LayerGradCam(module, module.get_submodule(case.layer))
    classes = torch.tensor(case.classes, device=images.device)

    def run() -> Any:
        grids = method.attribute(images, classes, relu_attributions=True).detach()
        return LayerAttribution.interpolate(grids, tuple(images.shape[2:]), "bilinear")[:, 0].cpu()

    yield run


class Contender(NamedTuple):
    """``open(case, module, images)`` is a context that yields the call to time; set-up and clean-up are not timed."""

    title: str
    open: Callable[[Case, nn.Module, Tensor], AbstractContextManager[Run]]
    maps: bool = True
    bf16: bool = False


_unaided = partial(_camkit, target_layer=None, target=None)
CONTENDERS = {
    "plain": Contender("plain inference_mode", _plain, maps=False),
    "plain-last": Contender("plain, channels last", partial(_plain, channels_last=True), maps=False),
    "camkit": Contender("camkit", _camkit),
    "auto": Contender("camkit, chooses layer and class", _unaided),
    "first": Contender("camkit, first call on a model", partial(_unaided, fresh=True, spread="measured")),
    "top5": Contender("camkit, top-5 targets", partial(_camkit, target=camkit.targets.top(5)), maps=False),
    "plusplus": Contender("camkit, Grad-CAM++", partial(_camkit, method="gradcam++"), maps=False),
    "plain-bf16": Contender("plain inference_mode, bf16", partial(_plain, bf16=True), maps=False, bf16=True),
    "bf16": Contender("camkit, bf16", partial(_camkit, precision="bf16"), bf16=True),
    "grad-cam": Contender("grad-cam", _grad_cam),
    "torchcam": Contender("torchcam", _torchcam),
    "captum": Contender("captum", _captum),
}


def measure_memory(case: Case, name: str) -> tuple[int, str]:
    """Return the most bytes that one call adds to what the process held before it, after a warm-up with one image."""
    (module, images), contender = load(case), CONTENDERS[name]
    with contender.open(replace(case, classes=case.classes[:1]), module, images[:1]) as run:
        run()
    gc.collect()
    with contender.open(case, module, images) as run:
        if images.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            return torch.cuda.max_memory_allocated() - before, "torch.cuda.max_memory_allocated"
        reset_peak()
        before = resident("VmRSS")
        run()
        return resident("VmHWM") - before, "the peak of the resident set"


def measure_growth(case: Case, calls: int) -> list[dict[str, int]]:
    """Return the memory that a process holds after a tenth of the calls and after all of them."""
    (module, images), held = load(case), []
    for call in range(1, calls + 1):
        camkit.explain(module, images, method="gradcam")
        if call in (calls // 10, calls):
            gc.collect()
            device = torch.cuda.memory_allocated() if images.is_cuda else 0
            tensors = sum(issubclass(type(item), Tensor) for item in gc.get_objects())
            held.append({"call": call, "rss": psutil.Process().memory_info().rss, "cuda": device, "tensors": tensors})
    return held


def in_own_process(task: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of this script in a fresh process and return its result."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(task, *arguments).result()


def as_maps(result: Any) -> np.ndarray:
    """Return a contender's result as maps (N, H, W)."""
    if not isinstance(result, (np.ndarray, Tensor)):
        result = [explanation.heatmap for explanation in (result if isinstance(result, list) else [result])]
    return np.asarray(result, dtype=np.float64)


def agreement(maps: np.ndarray, others: np.ndarray) -> dict[str, float]:
    """Compare maps (N, H, W) with others, image by image.

    If one map of an image is flat, the correlation is 0; if both are flat, the image does not count.
    """
    correlations = []
    for own, other in zip(maps, others, strict=True):
        flat = (np.ptp(own) == 0, np.ptp(other) == 0)
        if not all(flat):
            correlations.append(0.0 if any(flat) else float(np.corrcoef(own.ravel(), other.ravel())[0, 1]))
    summary = {"correlation": statistics.fmean(correlations), "least": min(correlations)} if correlations else {}
    return {**summary, "empty": sum(not other.any() for other in others)}


def measure(case: Case, names: Sequence[str], rounds: int, memory_of: Sequence[str]) -> dict[str, Any]:
    """Measure the time, the extra memory and the agreement of each contender on one model.

    They explain each image's best class, at the layer that camkit chooses.
    """
    module, images = load(case)
    with torch.inference_mode():
        classes = tuple(module(images).argmax(1).tolist())
    layer = next(camkit.explain_many(module, images[:1], method="gradcam")).layer
    case = replace(case, layer=layer, classes=classes)
    if "#" in case.layer:
        raise SystemExit(f"layer {case.layer} of {case.model} is one of several calls, and no peer can name a call")
    rows: dict[str, dict[str, Any]] = {}
    runs = {name: partial(CONTENDERS[name].open, case, module, images) for name in names}
    for name, seconds in take_turns(runs, rounds).items():
        low, middle, high = quartiles(seconds, rows["plain"]["seconds"] if rows else seconds)
        rows[name] = {"title": CONTENDERS[name].title, "seconds": seconds, "ms": 1000 * statistics.median(seconds)}
        rows[name] |= {"time": middle, "low": low, "high": high}
    maps: dict[str, np.ndarray] = {}
    for name in [name for name in names if CONTENDERS[name].maps]:
        with CONTENDERS[name].open(case, module, images) as run:
            maps[name] = as_maps(run())
        rows[name] |= agreement(maps["camkit"], maps[name])
    torch.cuda.empty_cache()
    how = ""
    for name in memory_of:
        rows[name]["bytes"], how = in_own_process(measure_memory, case, name)
        ratio = rows[name]["bytes"] / rows["plain"]["bytes"]
        rows[name] |= {"mib": rows[name]["bytes"] / 2**20, "memory": ratio}
    return {**asdict(case), "memory_by": how, "contenders": rows}


def render(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    units = f" ({', '.join(report['units'])})" if report["units"] else ""
    parts = [
        f"## {report['processor']}{units}, {report['threads']} threads",
        f"{report['date']}: {versions}. Seeded weights; float32 unless said otherwise; {report['rounds']} rounds.",
        *(f"Left out: {name}, {reason}." for name, reason in report["left_out"].items()),
    ]
    for model in report["models"]:
        rows = model["contenders"].values()
        cells = [[format(row[key], form) if key in row else "" for key, _, form in COLUMNS] for row in rows]
        shape = f"{model['batch']} images of {model['size']}x{model['size']}"
        parts.append(f"### {model['model']}, {shape}, layer `{model['layer']}`")
        parts.append(table([heading for _, heading, _ in COLUMNS], cells))
    first, last = report["growth"]
    rss, cuda, tensors = (last[key] - first[key] for key in ("rss", "cuda", "tensors"))
    parts.append(NOTE.format(how=report["models"][0]["memory_by"]))
    parts.append(
        f"Growth from call {first['call']} to call {last['call']} of `explain` (resnet18, one image of 64x64): "
        f"{rss / 2**20:+.1f} MiB resident, {cuda / 2**20:+.1f} MiB on the GPU, {tensors:+d} tensors."
    )
    return "\n\n".join(parts) + "\n"


def with_section(page: str, key: str, section: str) -> str:
    """Return the page with this key's section replaced, or added at the end; the rest does not change."""
    begin, end = f"<!-- bench_peers: {key} -->", f"<!-- end of bench_peers: {key} -->"
    block = f"{begin}\n\n{section.strip()}\n\n{end}"
    if begin in page and end in page:
        return page.partition(begin)[0] + block + page.partition(end)[2]
    return f"{page.rstrip()}\n\n{block}\n".lstrip()


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = ["resnet50", "mobilenet_v3_large", "vgg16"]
    add = partial(parser.add_argument, metavar="N", type=int)
    parser.add_argument("--models", nargs="+", default=default, metavar="NAME", help="torchvision classifiers")
    add("--batch", default=16, help="images per call; on a CPU VGG-16 gets at most 4")
    add("--size", default=224, help="height and width of the images")
    add("--rounds", default=11, help="how often each contender's time is measured")
    add("--calls", default=1000, help="calls over which the growth of memory is measured")
    add("--threads", default=torch.get_num_threads(), help="threads of PyTorch on the CPU")
    parser.add_argument("--device", default="cpu", help="cpu or a CUDA device")
    parser.add_argument("--bf16", action="store_true", help="measure bf16 even if the processor has no units for it")
    parser.add_argument("--quick", action="store_true", help="3 rounds, 40 calls, memory of plain inference and camkit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all measurements")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="page in which to update the section of this processor"
    )
    return parser.parse_args()


def measure_all(given: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the options name."""
    rounds, calls = (3, 40) if given.quick else (given.rounds, given.calls)
    name, units = processor(given.device)
    versions = {peer: importlib.metadata.version(peer) for peer, module in PEERS.items() if find_spec(module)}
    left_out = {peer: "not installed" for peer in PEERS if peer not in versions}
    if not given.bf16 and not any("bf16" in unit for unit in units):
        left_out |= {key: "no bf16 units" for key, contender in CONTENDERS.items() if contender.bf16}
    names = [key for key in CONTENDERS if key not in left_out]
    growth = in_own_process(measure_growth, Case("resnet18", 1, 64, given.device, given.threads), calls)
    os.environ.update(STEADY_HEAP)
    models = []
    for model in given.models:
        print(f"measuring {model}", file=sys.stderr, flush=True)
        batch = min(given.batch, CPU_BATCHES.get(model, given.batch)) if given.device == "cpu" else given.batch
        case = Case(model, batch, given.size, given.device, given.threads)
        models.append(measure(case, names, rounds, ["plain", "camkit"] if given.quick else names))
    own = {"camkit": camkit.__version__, "python": platform.python_version()}
    own |= {"torch": torch.__version__, "torchvision": torchvision.__version__}
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "processor": name,
        "units": units,
        "threads": given.threads,
        "versions": {**own, **versions},
        "left_out": left_out,
        "rounds": rounds,
        "models": models,
        "growth": growth,
    }


def main() -> None:
    """Measure, print, and write the files that the options name."""
    given = options()
    report = measure_all(given)
    text = render(report)
    print(text)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    if given.markdown:
        page = given.markdown.read_text() if given.markdown.exists() else "# Benchmarks\n"
        key = re.sub(r"\W+", "-", report["processor"].lower()).strip("-")
        given.markdown.write_text(with_section(page, key, text))


if __name__ == "__main__":
    main()
