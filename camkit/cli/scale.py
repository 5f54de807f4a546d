"""``camkit scale``: explains very many pictures on a cluster, into a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from rich.text import Text

from camkit.cli.options import METHOD, OUTPUT, RUN, Common, Source
from camkit.cli.rows import SECONDS_BETWEEN_LINES, progress_words, summary
from camkit.cli.targets import TargetOptions
from camkit.cli.terminal import TALK, QuietConsole, printer, say
from camkit.errors import InputError, printable

if TYPE_CHECKING:
    from camkit.explainer import Options
    from camkit.scale.cluster import Progress


def scale(
    *pictures: str,
    source: Source,
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="FOLDER")],
    targets: TargetOptions | None = None,
    method: Annotated[str | None, Parameter(group=METHOD, metavar="NAME")] = None,
    layer: Annotated[list[str] | None, Parameter(alias="-l", negative=(), group=METHOD, metavar="NAME")] = None,
    fuse: Annotated[Literal["mean", "max", "product"], Parameter(group=METHOD)] = "mean",
    smooth: Annotated[Literal["augment", "eigen", "augment+eigen"] | None, Parameter(group=METHOD)] = None,
    precision: Annotated[Literal["fp32", "bf16", "fp16", "bf16-forced"], Parameter(group=METHOD)] = "fp32",
    batch_size: Annotated[int | None, Parameter(alias="-b", group=METHOD, metavar="NUMBER")] = None,
    draft: Annotated[bool, Parameter(negative=(), group=METHOD, show_default=False)] = False,
    recursive: Annotated[bool, Parameter(group=METHOD, show_default=False)] = True,
    address: Annotated[str | None, Parameter(group=RUN, metavar="ADDRESS")] = None,
    actors: Annotated[int | None, Parameter(group=RUN, metavar="NUMBER")] = None,
    cpus: Annotated[float, Parameter(group=RUN, metavar="NUMBER")] = 1.0,
    gpus: Annotated[float | None, Parameter(group=RUN, metavar="NUMBER")] = None,
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    resume: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Explain very many pictures on a Ray cluster, and write a table with a row for each picture and target.

    Needs the extra camkit[ray]. Every node must be able to read the pictures, the model's files and the folder.

    Args:
        pictures: Files, folders or quoted glob patterns; or one Parquet file or folder, whose name ends in .parquet,
            with the column path or bytes.
        source: The model.
        out: The folder for the table, which camkit.scale.read reads.
        targets: What to explain.
        method: As for explaining pictures.
        layer: As for explaining pictures.
        fuse: How to combine several layers into one map.
        smooth: As for explaining pictures.
        precision: The number format of the computation.
        batch_size: Pictures per pass. Default: 32 on a GPU, 8 on a core.
        draft: Read large JPEG files at a half, a quarter or an eighth of their size.
        recursive: Search folders with their subfolders, which is the default, or without them.
        address: The cluster: auto, host:port or ray://host:port. Default: the one in RAY_ADDRESS or on this machine;
            if there is none, one is started with all cores of this machine.
        actors: The number of processes that each hold the model. Default: as many as the cluster has room for.
        cpus: Cores for each of them, if it has no GPU.
        gpus: GPUs for each of them, or the share of one. Default: 1 if the cluster has any.
        overwrite: Replace the table.
        resume: Continue the table of an interrupted run; pictures that it has, with the same path and the same bytes,
            are left out.
        common: The config, and how much is printed.
    """
    (common or Common()).begin()
    if not pictures:
        raise InputError("name at least one picture or folder: camkit scale photos/ --model resnet50 --out results")
    from camkit.images.listing import Pictures
    from camkit.scale.actors import Pool, connected
    from camkit.scale.cluster import ParquetPictures, explain_on_cluster, parquet_pictures, prepared_job

    targets = targets or TargetOptions()
    targets.check()
    if targets.mask is not None:
        raise InputError("--mask belongs to one picture; explain that picture alone, without camkit scale")
    is_parquet = len(pictures) == 1 and pictures[0].lower().endswith(".parquet")
    with connected(address, quiet=not TALK.verbose):
        files = parquet_pictures(Path(pictures[0])) if is_parquet else Pictures(pictures, skip=out, recursive=recursive)
        options: Options = {
            "method": method,
            "target": targets.targets([], None),
            "precision": precision,
            "fuse": fuse,
            "smooth": smooth,
        }
        if batch_size is not None:
            options["batch_size"] = batch_size
        job = prepared_job(source.for_nodes(), layer, draft=draft, **options)
        pool = Pool.of_cluster(actors, cpus, gpus, spare=isinstance(files, ParquetPictures) and files.has_data)
        say(f"{pool}, {job.batch_size(pool)} pictures per pass")
        with _Shown() as shown:
            done = explain_on_cluster(
                job, files, out, pool, resume=resume, overwrite=overwrite, on_progress=shown.update
            )
    _print_errors(done)
    if not TALK.quiet:
        skipped = 0 if done.total is None else done.total - done.explained - done.failed
        line = summary(done.explained, done.failed, done.empty, done.explained, done.seconds, skipped, out)
        printer().print(line, markup=False)
    return InputError.exit_code if done.failed or done.errors else 0


class _Shown:
    """Shows how far the job is: a bar on a terminal, otherwise a line once a minute."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, TextColumn

        from camkit.cli.bars import Bars

        console = QuietConsole(stderr=True)
        self._has_bar = console.is_terminal and not TALK.quiet
        columns = TextColumn("explaining"), BarColumn(), TextColumn("{task.description}")
        self._bars = Bars(*columns, console=console, shown=self._has_bar)
        self._bar = self._bars.add_task("", total=None)
        self._printed = 0.0

    def __enter__(self) -> _Shown:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, done: Progress) -> None:
        """Show what is finished."""
        finished = done.explained + done.failed
        words = progress_words(finished, 0, done.total, done.seconds)
        if self._has_bar:
            self._bars.update(self._bar, completed=finished, total=done.total, description=words)
        elif done.seconds - self._printed > SECONDS_BETWEEN_LINES:
            self._printed = done.seconds
            say(words)


def _print_errors(done: Progress) -> None:
    """Print each error once, with the first picture that has it, and how many more do."""
    for kind, count in done.errors.items():
        path, error = done.first[kind]
        more = f" ({count - 1:,} more pictures have the same error)" if count > 1 else ""
        named = error if Path(path).name in error else f"{path}: {error}"
        printer(stderr=True).print(Text(printable(named) + more, "red"))
