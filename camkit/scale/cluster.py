"""Explains pictures on a cluster with Ray Data: a pool of actors, each with the model, and the rows of a table.

``explain_dataset`` is the step that users put into their own pipelines. ``explain_on_cluster`` is the command: it lists
the pictures, lets Ray write the table, and leaves out what an earlier run finished.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import math
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from PIL import Image
from torch import nn

from camkit.engine.interrupts import undisturbed
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError, ImageError, InputError, OutputError, advice, brief
from camkit.explainer import Config, Options, explain_many
from camkit.explanation import Explanation
from camkit.images.files import check_folder, refuse_input
from camkit.images.listing import Pictures
from camkit.images.read import open_picture
from camkit.layers.names import Layers
from camkit.methods import AUTO
from camkit.models import as_model, device_of, usual_batch_size
from camkit.models.loaded import LoadedModel
from camkit.scale.actors import ModelSource, Pool, Source, cause_of, import_ray, load_on_node
from camkit.scale.fingerprint import Fingerprint, digest_of_code, fingerprint
from camkit.scale.schema import ERROR, Row, row_of, row_of_failure, text_of
from camkit.scale.table import CONTENT, WRITTEN_WITH, ClusterTable, Finished, arrow_table, cluster_schema, key_of
from camkit.types import Failure

if TYPE_CHECKING:
    from ray.data import Dataset
else:
    Dataset = Any

_PASSES_ON_GPU = 8
"""An actor with a GPU gets the pictures of this many passes at once, so that reading them overlaps computing."""
_READERS = 4
"""Threads of an actor that read and checksum files, as for a folder."""
_READ_AHEAD, _MOST_READ_AHEAD = 16, 72 * 2**20
"""The most pictures that wait for the model, and the most bytes of them in memory."""
_BLOCKS_PER_ACTOR = 8
"""The number of blocks into which the listed pictures are divided for each actor. While the last actor finishes, the
others are idle for at most an eighth of the time."""
_MOST_PER_BLOCK = 1024
"""The most pictures in a block; a lost worker costs its blocks."""
_MOST_BLOCKS = 100_000
"""The most blocks of a job, because the driver takes about 10 ms for each. In a very large job, the blocks are
larger."""
_ROWS_ON_GPU, _ROWS_ON_CPU = 4096, 1024
"""The least rows of a part. Ray may start a process to write a part. This took 2 to 3 seconds of one core, which is
little compared with explaining the pictures of a part."""
_POLL_SECONDS, _POLL_SHARE = 1.0, 20
"""How often finished parts are counted. The pause between counts is at least this many times as long as a count."""

# --- the step of a pipeline


def explain_dataset(
    dataset: Dataset,
    model: Source = None,
    target_layer: Layers | None = None,
    *,
    draft: bool = False,
    resume: str | Path | None = None,
    actors: int | None = None,
    cpus: float = 1.0,
    gpus: float | None = None,
    **options: Unpack[Options],
) -> Dataset:
    """Explain the pictures of a Ray dataset, with a pool of actors that hold the model.

    Args:
        dataset: rows with the column ``bytes`` (a picture's file), ``image`` (an array of uint8, as
            ``ray.data.read_images`` returns it) or ``path`` (a file that every node can read). With ``bytes`` and
            ``image``, a picture is named by the column ``path`` if there is one, otherwise by its checksum.
        model: a name as ``camkit.load_model`` takes it, from which each actor loads the model; a function without
            arguments that returns a module, a module and its preprocessing, or a LoadedModel; or a module, which is put
            into the object store once. None is the config's model.
        target_layer: as for ``camkit.explain``.
        draft: as for ``camkit.explain_many``.
        resume: a table of an earlier run. Pictures that are in it with the same path and the same bytes are left out.
        actors: the number of actors; None takes as many as the cluster has room for. Without GPUs, it leaves an eighth
            of the cores, at least one, to the tasks that read and write.
        cpus, gpus: the cores, or the GPUs or the share of one, for each actor. None takes one GPU if the cluster has
            any. Without a GPU, an actor computes with as many threads as it has cores.
        **options: as for ``camkit.explain``, but no ``progress``. By default, ``batch_size`` is 32 on a GPU and 8 on
            cores.

    Returns:
        A dataset that is computed when it is consumed. It has the columns of a table (``camkit.scale.read``) and
        ``content``, a checksum of the picture's bytes, with a row for each picture and target. A picture that cannot be
        explained is a row with ``status`` "error".

    Raises:
        InputError: something in the call is wrong, or Ray is not installed. When the dataset is consumed, the errors of
            actors are raised as Ray raises them, as an instance of their own class too.
    """
    job = prepared_job(model, target_layer, draft=draft, **options)
    finished = Finished([])
    if resume is not None:
        if not Path(resume).is_dir():
            raise InputError(f"there is no table {resume} to continue")
        with ClusterTable(Path(resume), job.made_with, resume=True) as table:
            finished = table.finished
    return job.explained(dataset, Pool.of_cluster(actors, cpus, gpus, spare=True), finished)


@dataclass(frozen=True)
class Job:
    """What is to be explained. The arguments are checked, and it can be sent to the actors.

    Attributes:
        source: the model for the actors.
        made_with: what decides the results.
        options: what ``explain_many`` gets.
    """

    source: ModelSource
    made_with: Fingerprint
    options: Mapping[str, Any]

    def batch_size(self, pool: Pool) -> int:
        """Return the number of pictures per pass."""
        usual: int = self.options.get("batch_size") or usual_batch_size(torch.device(pool.device))
        return usual

    def explained(self, dataset: Dataset, pool: Pool, finished: Finished) -> Dataset:
        """Return the dataset of rows."""
        ray, batch_size = import_ray(), self.batch_size(pool)
        job = replace(self, options={**self.options, "batch_size": batch_size})
        rows: Dataset = dataset.map_batches(
            Explaining,
            fn_constructor_args=(job, pool, [ray.put(finished)]),
            batch_size=batch_size * (_PASSES_ON_GPU if pool.gpus else 1),
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(size=pool.actors),
            **pool.resources(),
        )
        rows.context.raise_original_map_exception = True  # Ray's own exception does not name the cause
        return rows


def prepared_job(
    model: Source | ModelSource,
    target_layer: Layers | None = None,
    *,
    draft: bool = False,
    **options: Unpack[Options],
) -> Job:
    """Load the model here, check the arguments with it, and return what the actors get.

    Raises:
        InputError: something in the call is wrong, or Ray is not installed.
    """
    import_ray()
    if options.pop("progress", None) is not None:
        raise InputError("a cluster reports no progress of single pictures; leave out progress")
    if options.pop("references", None) is not None:
        raise InputError("a cluster takes no reference pictures; leave out references, or explain on one machine")
    taken = {name: options.pop(name, None) for name in ("preprocess", "labels", "device", "config")}  # type: ignore[misc]
    config = taken["config"]
    source = model if isinstance(model, ModelSource) else ModelSource(model, **taken)
    if config is not None:
        target_layer, options = _with_settings(config, target_layer, options)
        source = replace(source, config=_as_mapping(config))
    is_own = isinstance(source.model, (nn.Module, LoadedModel))
    loaded = _on_cpu(as_model(source.model, preprocess=source.preprocess, labels=source.labels)) if is_own else None
    loaded = loaded or replace(source, device=None).load("cpu")
    settings: dict[str, Any] = {**options, "target_layer": target_layer, "draft": draft}
    with warnings.catch_warnings():  # the actors run elsewhere, and say themselves which precision they use
        warnings.simplefilter("ignore")
        explain_many(loaded, [], **settings)
    kept = {name: options.get(name) for name in ("precision", "fuse", "smooth")}
    kept["method"] = options.get("method") or AUTO.name
    target = options.get("target")
    code = digest_of_code(loaded, kept["method"], target)
    made_with = fingerprint(loaded, **kept, layers=target_layer, targets=target, draft=draft, code=code)
    return Job(source.sent(loaded), made_with, settings)


def _with_settings(config: Config, layer: Layers | None, options: Any) -> tuple[Layers | None, Any]:
    """Complete the options from a config."""
    from camkit.config.settings import as_settings  # noqa: PLC0415 - few calls have a config

    usual = as_settings(config).explain
    for name in ("method", "precision", "fuse", "smooth", "batch_size"):
        if options.get(name) is None and getattr(usual, name) is not None:
            options[name] = getattr(usual, name)
    return usual.layer if layer is None else layer, options


def _as_mapping(config: Config) -> Config:
    """Return a config that needs no file on the nodes."""
    from camkit.config.settings import as_settings  # noqa: PLC0415 - few calls have a config

    return as_settings(config)


def _on_cpu(loaded: LoadedModel) -> LoadedModel:
    """Return a model on the CPU; the caller's own stays where it is."""
    if device_of(loaded.module).type == "cpu":
        return loaded
    return replace(loaded, module=copy.deepcopy(loaded.module).cpu())


class Explaining:
    """Explains the pictures of batches; Ray makes one in each actor.

    Args:
        job: the model and the options.
        pool: what the actor may take.
        finished: the keys of pictures that are left out, as a reference; the actors of a node share their memory.
    """

    def __init__(self, job: Job, pool: Pool, finished: Sequence[Any]) -> None:
        self._job, self._pool = job, pool
        self._finished: Finished = import_ray().get(finished[0])

    def __call__(self, batch: dict[str, np.ndarray]) -> Any:
        """Return the rows of a batch as pyarrow's table.

        Raises:
            InputError: the dataset has no column with pictures, or this node has another model.
            Exception: whatever the model raises.
        """
        contents: dict[str, str] = {}
        unread: list[Failure] = []
        explained = self._explained(self._images(batch, contents, unread))
        rows = [_row(explanation, contents) for explanation in explained]
        rows += [_row(failure, contents) for failure in unread]
        return arrow_table(rows, cluster_schema())

    @functools.cached_property
    def _explained(self) -> Callable[[Iterable[Any]], Iterator[Explanation | Failure]]:
        """The model. It is loaded with the first batch, so that its errors are raised like those of a batch."""
        loaded = load_on_node(self._job.source, self._pool, self._job.made_with)
        return functools.partial(explain_many, loaded, on_error="yield", **self._job.options)

    def _images(
        self, batch: dict[str, np.ndarray], contents: dict[str, str], unread: list[Failure]
    ) -> Iterator[str | Image.Image]:
        """Yield the pictures that are not finished; note their checksums, and the pictures that cannot be read."""
        tasks = (Task(functools.partial(_checksummed, *picture), in_thread=True) for picture in _pictures(batch))
        read = in_order(tasks, workers=_READERS, ahead=_READ_AHEAD, most=_MOST_READ_AHEAD, size_of=_size)
        for name, content, image in read:
            if key_of(text_of(name), content) in self._finished:
                continue
            if contents.setdefault(text_of(name), content) != content:
                raise InputError(f"two different pictures are called {name}; give each row its own path")
            if isinstance(image, Failure):
                unread.append(image)
            else:
                yield image


def _row(result: Explanation | Failure, contents: Mapping[str, str]) -> Row:
    row = row_of(result) if isinstance(result, Explanation) else row_of_failure(result)
    return {**row, CONTENT: contents[row["path"]]}


def _pictures(batch: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each picture, and its bytes or its pixels; None if it is a file."""
    column = next((name for name in ("bytes", "image", "path") if name in batch), None)
    if column is None:
        raise InputError(
            f"the dataset has the columns {', '.join(batch)}; camkit needs 'path', 'bytes' or 'image' with the pictures"
        )
    data = itertools.repeat(None) if column == "path" else batch[column]
    names = batch.get("path", itertools.repeat(""))
    return ((str(name or ""), item) for name, item in zip(names, data, strict=False))


def _checksummed(name: str, data: Any) -> tuple[str, str, str | Image.Image | Failure]:
    """Return a picture's name, the checksum of its bytes, and the picture: a file, pixels, or why there are none.

    A file is decoded by ``explain_many``, which also says why it cannot be read.
    """
    if data is None:
        with contextlib.suppress(OSError, ValueError):
            return name, _checksum(Path(name).read_bytes()), name
        return name, "", name
    if isinstance(data, np.ndarray):
        content = _checksum(str(data.shape).encode(), np.ascontiguousarray(data))
    else:
        content = _checksum(data)
    name = name or content
    try:
        picture = _from_pixels(data, name) if isinstance(data, np.ndarray) else open_picture(name, data)
    except CamkitError as error:
        return name, content, Failure(name, error)
    picture.filename = name  # type: ignore[attr-defined]  # becomes the source of the explanation
    return name, content, picture


def _checksum(*data: Any) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in data:
        state.update(part)
    return state.hexdigest()


def _from_pixels(pixels: np.ndarray, name: str) -> Image.Image:
    if pixels.dtype != np.uint8:
        raise ImageError(f"{name} is an array of {pixels.dtype}; the column 'image' must hold pixels of uint8")
    try:
        return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    except TypeError as error:
        raise ImageError(f"{name} is an array of shape {pixels.shape}, not a picture (H, W, 3) or (H, W)") from error


def _size(read: tuple[str, str, Any]) -> int:
    image = read[2]
    return image.width * image.height * 3 if isinstance(image, Image.Image) else 0


# --- the command


@dataclass
class Progress:
    """What a job has finished: pictures whose rows are on the disk.

    Attributes:
        explained, failed: how many pictures have an explanation, and how many have only errors.
        empty: the number of maps without heat.
        errors: how many pictures have the same error, without their names.
        first: the first picture with each error.
        total: how many pictures there are; None if that is unknown.
        seconds: the time since the start.
    """

    explained: int = 0
    failed: int = 0
    empty: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[str, str]] = field(default_factory=dict)
    total: int | None = None
    seconds: float = 0.0

    def add(self, rows: Iterable[tuple[str, str, str | None]]) -> None:
        """Count the rows of a part: path, status and error. The rows of a picture follow each other."""
        for path, of_picture in itertools.groupby(rows, key=lambda row: row[0]):
            several = list(of_picture)
            problems = [error or "" for _, status, error in several if status == ERROR]
            self.empty += sum(status not in ("ok", ERROR) for _, status, _ in several)
            self.failed += len(problems) == len(several)
            self.explained += len(problems) < len(several)
            for problem in problems:
                kind = problem.replace(path, "").replace(Path(path).name, "")
                self.errors[kind] += 1
                self.first.setdefault(kind, (path, problem))


def explain_on_cluster(
    job: Job,
    pictures: Pictures | ParquetPictures,
    out: Path,
    pool: Pool,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Explain picture files on the cluster, and let Ray write the table.

    Args:
        job: the model and the options.
        pictures: the files, which every node can read, or what ``parquet_pictures`` returns.
        out: the folder for the table, which every node can write into.
        pool: the actors.
        resume: continue the table if it exists. Pictures with the same path and the same bytes are left out.
        overwrite: replace the table if it exists.
        on_progress: called from another thread with what is finished, about once a second.

    Raises:
        InputError: something in the call is wrong, or the table belongs to a run with other settings.
        OutputError: the table exists, cannot be written, or would replace the Parquet files that are read.
        Exception: whatever the model raises.
    """
    ray = import_ray()
    out = Path(os.path.abspath(out))  # noqa: PTH100 - links stay as the nodes know them
    check_folder(out)
    if isinstance(pictures, ParquetPictures) and overwrite:  # which deletes the Parquet files in the folder
        refuse_input(out, {Path(file).parent for file in pictures.files})
    table = ClusterTable(out, job.made_with, resume=resume, overwrite=overwrite and not resume)
    with table:
        if isinstance(pictures, ParquetPictures) and pictures.has_data:
            total, dataset = pictures.rows, pictures.dataset()
        else:
            listed = pictures.paths() if isinstance(pictures, ParquetPictures) else (item.path for item in pictures)
            names = [os.path.abspath(name) for name in listed]  # noqa: PTH100 - links stay as the nodes know them
            blocks = _blocks(names, pool.actors, job.batch_size(pool))
            total, dataset = len(names), ray.data.from_arrow(blocks)
            pool = replace(pool, actors=min(pool.actors, len(blocks)))
        with _Watch(table, total, on_progress) as watch, _errors_of_ray(out):
            job.explained(dataset, pool, table.finished).write_parquet(
                str(out),
                filename_provider=_PartNames(),
                min_rows_per_file=_ROWS_ON_GPU if pool.gpus else _ROWS_ON_CPU,
                ray_remote_args={"num_cpus": 0},  # the actors have all cores
                schema=table.schema(),
                **WRITTEN_WITH,
            )
    return watch.progress


class _PartNames:
    """Names parts as ``camkit.scale.read`` expects them. Ray may write a part again, which replaces it."""

    def get_filename_for_task(self, write_uuid: str, task_index: int) -> str:
        return f"part-{write_uuid}-{task_index:06}-{{i}}.parquet"


def _blocks(names: Sequence[str], actors: int, batch_size: int) -> list[Any]:
    """Return file names as blocks of whole batches, enough of them to keep all actors busy until the end."""
    import pyarrow as pa  # noqa: PLC0415 - Ray Data needs it

    most = max(_MOST_PER_BLOCK, math.ceil(len(names) / _MOST_BLOCKS))
    wanted = min(math.ceil(len(names) / (actors * _BLOCKS_PER_ACTOR)), most)
    size = max(1, math.ceil(wanted / batch_size)) * batch_size
    return [pa.table({"path": names[start : start + size]}) for start in range(0, len(names), size)]


@dataclass(frozen=True)
class ParquetPictures:
    """Parquet files with pictures or their paths.

    Attributes:
        files: the files.
        columns: those of their columns that camkit reads.
        rows: how many pictures they have.
    """

    files: list[str]
    columns: list[str]
    rows: int

    @property
    def has_data(self) -> bool:
        """Whether they hold the pictures themselves, and not only their paths."""
        return self.columns != ["path"]

    def dataset(self) -> Dataset:
        """Return the dataset."""
        read: Dataset = import_ray().data.read_parquet(self.files).select_columns(self.columns)
        return read

    def paths(self) -> Iterator[str]:
        """Yield the paths."""
        import pyarrow.parquet as pq  # noqa: PLC0415 - Ray Data needs it

        for file in self.files:
            yield from pq.read_table(file, columns=["path"]).column("path").to_pylist()


def parquet_pictures(path: Path) -> ParquetPictures:
    """Read the footers of a Parquet file, or of all files of a folder.

    Raises:
        InputError: it does not exist or is damaged, or has no column with pictures.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415 - Ray Data needs it

    path = Path(os.path.abspath(path))  # noqa: PTH100
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} has no Parquet files")
    rows = 0
    for file in files:
        try:
            footer = pq.read_metadata(file)
            names = footer.schema.to_arrow_schema().names
        except Exception as error:  # pyarrow has errors of several kinds for damaged files
            raise InputError(f"{file} cannot be read: {brief(error)}") from error
        columns = [name for name in ("path", "bytes", "image") if name in names]
        if not columns:
            raise InputError(f"{file} has the columns {', '.join(names)}; camkit needs 'path' or 'bytes'")
        rows += footer.num_rows
    return ParquetPictures(list(map(str, files)), columns, rows)


@contextlib.contextmanager
def _errors_of_ray(out: Path) -> Iterator[None]:
    """Raise what an actor or a writing task raised, without Ray's report around it."""
    ray = import_ray()
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = cause_of(error)
        if isinstance(cause, OSError) and not isinstance(cause, CamkitError):
            reason = os.strerror(cause.errno) if cause.errno else brief(cause)  # pyarrow says more around it
            raise OutputError(
                f"cannot write {out}: {reason}; its finished rows are kept, and "
                f"{advice('resume=True', '--resume')} continues from there"
            ) from error
        raise cause from error


class _Watch:
    """Counts the rows of parts when they are finished, in another thread."""

    def __init__(self, table: ClusterTable, total: int | None, on_progress: Callable[[Progress], None] | None) -> None:
        self.progress = Progress(total=total)
        self._table, self._on_progress = table, on_progress
        self._counted = set(table.parts())
        self._started = time.perf_counter()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Watch:
        with undisturbed():  # otherwise Ctrl-C could leave a lock of the thread or the event taken
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with undisturbed():
            self._end.set()
            self._thread.join()
        self._count()

    def _run(self) -> None:
        wait = _POLL_SECONDS
        while not self._end.wait(wait):
            began = time.perf_counter()
            self._count()
            if self._on_progress is not None:
                self._on_progress(self.progress)
            wait = max(_POLL_SECONDS, _POLL_SHARE * (time.perf_counter() - began))

    def _count(self) -> None:
        for part in self._table.parts():
            if part in self._counted:
                continue
            try:
                self.progress.add(self._table.values(part, "path", "status", "error"))
            except InputError:  # it is being written
                continue
            self._counted.add(part)
        self.progress.seconds = time.perf_counter() - self._started
