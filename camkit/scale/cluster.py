"""Explains pictures on a Ray cluster: actors that each hold the model compute batches of them.

``explain_dataset`` is a step of the user's own pipeline of Ray Data. ``Cluster`` serves the option ``--ray``: it gives
pieces of a folder, or of a check, to the same actors. Only this file imports Ray, and only when somebody uses it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import itertools
import logging
import math
import os
import pickle
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Unpack

import numpy as np
import torch
from PIL import Image
from torch import nn

from camkit.errors import CamkitError, InputError, ModelError, RunError, as_error, brief, optional, refuse
from camkit.explaining.explainer import explain_many
from camkit.explaining.explanation import Explanation
from camkit.images.read import from_array, open_picture
from camkit.kit.store import Fingerprint, differences, digest, fingerprint
from camkit.layers.names import Layers
from camkit.models import as_model, black_box_in, device_of, load_model, usual_batch_size
from camkit.models.loaded import Loadable, LoadedModel
from camkit.options import Options
from camkit.scale.table import arrow_schema, arrow_table, row_of, row_of_failure
from camkit.types import Failure, Progress

if TYPE_CHECKING:
    from ray.data import Dataset
else:
    Dataset = Any

_MOST_DEATHS = 4
"""An actor may die this many times, alone or with its node, until the run ends: pictures that need too much memory
kill every actor."""

Work: TypeAlias = Callable[[Any], Any]


def explain_dataset(
    dataset: Dataset,
    model: Loadable | Callable[[], Any],
    target_layer: Layers | None = None,
    *,
    draft: bool = False,
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
            into the object store once.
        target_layer: as for ``camkit.explain``.
        draft: as for ``camkit.explain_many``.
        actors: the number of actors; None takes as many as the cluster has room for. Without GPUs, it leaves an eighth
            of the cores, at least one, to the tasks that read and write.
        cpus, gpus: the cores, or the GPUs or the share of one, for each actor. None takes one GPU if the cluster has
            any. Without a GPU, an actor computes with as many threads as it has cores.
        **options: as for ``camkit.explain``, but no ``config`` and no ``progress``. By default, ``batch_size`` is 32 on
            a GPU and 4 on cores.

    Returns:
        A dataset that is computed when it is consumed. It has the columns of a table (``camkit.scale.read``), with a
        row for each picture and target. A picture that cannot be explained is a row with ``status`` "error".

    Raises:
        InputError: something in the call is wrong, or Ray is not installed. When the dataset is consumed, the errors of
            actors are raised as Ray raises them, as an instance of their own class too.
    """
    import_ray()
    named = {name: options.pop(name, None) for name in ("preprocess", "labels", "device", "config", "progress")}  # type: ignore[misc]
    here_only = [name for name in ("config", "progress") if named[name] is not None]
    refuse(*((name, f"a cluster takes no {name}; leave out {name}=") for name in here_only))
    make = functools.partial(_made, model, preprocess=named["preprocess"], labels=named["labels"])
    loaded = make(device="cpu")
    if isinstance(model, (nn.Module, LoadedModel)):
        make = functools.partial(_made, loaded, preprocess=None, labels=None)
    settings: dict[str, Any] = {**options, "target_layer": target_layer, "draft": draft}
    explain_many(loaded, [], **settings)  # checks the arguments
    pool = Pool.of_cluster(actors, cpus, gpus, spare=True)
    settings["batch_size"] = options.get("batch_size") or usual_batch_size(pool.device)
    # An actor with a GPU gets the pictures of this many passes at once, so that reading them overlaps computing
    size = settings["batch_size"] * (8 if pool.gpus else 1)
    cluster = Cluster(pool, make, fingerprint(loaded), named["device"])
    return cluster.mapped(dataset, functools.partial(_on_batches, settings), batch_size=size, batch_format="numpy")


def _made(model: Any, *, device: str | torch.device, preprocess: Any = None, labels: Any = None) -> LoadedModel:
    """Return a model on a device; a module of the caller's stays where it is."""
    if isinstance(model, str):
        model = load_model(model, device=device)
    elif not isinstance(model, (nn.Module, LoadedModel)):
        model = model()
        if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], nn.Module):
            model = LoadedModel(model[0], type(model[0]).__name__, model[1])
    loaded = as_model(model, preprocess=preprocess, labels=labels)
    is_there = black_box_in(loaded.module) is not None or device_of(loaded.module).type == torch.device(device).type
    return replace(loaded, module=(loaded.module if is_there else copy.deepcopy(loaded.module).to(device)).eval())


class Pool(NamedTuple):
    """The actors of a job.

    Attributes:
        actors: how many there are.
        cpus, gpus: what each of them takes.
    """

    actors: int
    cpus: float
    gpus: float

    @classmethod
    def of_cluster(
        cls, actors: int | None = None, cpus: float = 1.0, gpus: float | None = None, *, spare: bool = False
    ) -> Pool:
        """Return the pool that fits the cluster.

        Args:
            actors, cpus, gpus: as for ``explain_dataset``.
            spare: leave cores to the tasks that read the dataset if ``actors`` is None.

        Raises:
            InputError: a number is invalid, or no actor fits.
        """
        if cpus <= 0 or (gpus is not None and gpus < 0) or (actors is not None and actors < 1):
            raise InputError(f"actors, cpus and gpus must be positive, not {actors}, {cpus} and {gpus}")
        resources = import_ray().cluster_resources()
        cores, devices = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
        gpus = float(devices >= 1) if gpus is None else float(gpus)
        # The share of the cores, at least one core, that is left to the tasks that read a dataset. These tasks would
        # wait forever if actors held all cores.
        spared = max(1, math.floor(cores / 8)) if spare and actors is None else 0
        room = math.floor(devices / gpus if gpus else (cores - spared) / cpus)
        pool = cls(actors or max(1, room), cpus, gpus)
        if room < pool.actors:
            each = f"{gpus or cpus:g} {'GPUs' if gpus else 'cores'} each"
            beside = f"; reading takes {spared} cores" if spared else ""
            raise InputError(
                f"the cluster has {cores:g} cores and {devices:g} GPUs, too few for {pool.actors} actors with "
                f"{each}{beside}"
            )
        return pool

    @property
    def device(self) -> torch.device:
        """Where the actors compute."""
        return torch.device("cuda" if self.gpus else "cpu")


@dataclass(frozen=True)
class Cluster:
    """The actors of a job, and the model that each of them loads.

    Attributes:
        pool: how many actors there are, and what each of them takes.
        make: makes the model; its argument ``device`` says where.
        made_with: the fingerprint of the same model in this process; the actors compare theirs with it.
        device: where the model computes; None leaves it to the pool.
    """

    pool: Pool
    make: Callable[..., LoadedModel]
    made_with: Fingerprint
    device: str | torch.device | None = None

    def mapped(self, dataset: Dataset, begin: Callable[[LoadedModel], Work], **batches: Any) -> Dataset:
        """Return a dataset of what the actors make of the batches of another one.

        Args:
            dataset: what the actors get.
            begin: makes, from an actor's model, the function that works on a batch; it is sent to the actors.
            **batches: the size and the form of the batches, as for ``map_batches``.
        """
        ray = import_ray()
        instead = "pass its name, or a function that makes it"
        with as_error(ModelError, lambda error: f"the model cannot be sent to the cluster ({brief(error)}); {instead}"):
            job = ray.put((self, begin, str(Path.cwd())))
        # An actor with a GPU also takes one core, which is Ray's default.
        takes = {"num_gpus": self.pool.gpus} if self.pool.gpus else {"num_cpus": self.pool.cpus}
        results: Dataset = dataset.map_batches(
            _Actor,
            fn_constructor_args=([job],),
            compute=ray.data.ActorPoolStrategy(size=self.pool.actors),
            ray_remote_args_fn=lambda: {"max_restarts": _MOST_DEATHS - 1},
            **takes,
            **batches,
        )
        results.context.raise_original_map_exception = True  # Ray's own exception does not name the cause
        return results

    def map(self, begin: Callable[[LoadedModel], Work], items: Sequence[Any], per_pass: int) -> Iterator[Any]:
        """Divide items into pieces of whole passes, let the actors compute them, and yield the results in order.

        Args:
            begin: makes, from an actor's model, the function that computes a piece, a list of items.
            items: what is to be computed.
            per_pass: the number of items in a pass through the model.

        Raises:
            RunError: an actor dies again and again.
            Exception: whatever an actor raises.
        """
        ray = import_ray()
        # A piece has at most 8 passes, and each actor gets 8 pieces or more. While the last actor finishes, the others
        # are idle for at most an eighth of the time, and a lost worker costs its pieces.
        wanted = math.ceil(len(items) / (self.pool.actors * 8 * per_pass))
        size = min(max(1, wanted), 8) * per_pass
        pieces = [pickle.dumps(list(items[start : start + size])) for start in range(0, len(items), size)]
        if not pieces:
            return
        fewer = replace(self, pool=self.pool._replace(actors=min(self.pool.actors, len(pieces))))
        blocks = ray.data.from_arrow([arrow_table([{"piece": piece}]) for piece in pieces])
        results = fewer.mapped(blocks, functools.partial(_on_pieces, begin), batch_size=None, batch_format="pyarrow")
        results.context.execution_options.preserve_order = True
        try:
            for row in results.iter_rows():
                result = pickle.loads(row["result"])
                if isinstance(result, Exception):
                    raise result
                yield result
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error  # without Ray's report around it
        except ray.exceptions.RayError as error:
            raise RunError(
                f"a worker died {_MOST_DEATHS} times; it may be running out of memory: {brief(error)}"
            ) from error

    def explain(
        self,
        images: Iterable[Any],
        *,
        batch_size: int,
        on_pass: Callable[[], None] | None = None,
        progress: Progress | None = None,  # noqa: ARG002 - the actors report none
        **options: Any,
    ) -> Iterator[Explanation | Failure]:
        """Explain picture files as ``explain_many(..., on_error="yield")`` does; ``on_pass`` is called for each piece.

        The pictures are listed before the first one is explained.
        """
        begin = functools.partial(_on_files, {**options, "batch_size": batch_size})
        for rows in self.map(begin, list(images), batch_size):
            if on_pass is not None:
                on_pass()
            yield from rows


class _Actor:
    """Holds a model in a process of its own, and works with it. Ray makes one in each process.

    The model is loaded with the first batch, so that its errors are raised like those of a batch.

    Args:
        job: the reference to the cluster, to what makes the work, and to the folder in which relative paths start.
    """

    def __init__(self, job: Sequence[Any]) -> None:
        self._job = job[0]

    def __call__(self, batch: Any) -> Any:
        """Return what becomes of a batch."""
        return self._work(batch)

    @functools.cached_property
    def _work(self) -> Work:
        cluster, begin, folder = import_ray().get(self._job)
        with contextlib.suppress(OSError):  # a node that lacks the folder may still read absolute paths
            os.chdir(folder)
        if not cluster.pool.gpus:
            torch.set_num_threads(max(1, int(cluster.pool.cpus)))
        loaded = cluster.make(device=str(cluster.device or cluster.pool.device))
        # The parts of a fingerprint that must be the same on every node. A preprocessing may round differently on
        # another processor.
        parts = ("version of camkit", "network", "weights", "labels")
        there, here = ({name: made[name] for name in parts} for made in (cluster.made_with, fingerprint(loaded)))
        different = differences(there, here)
        if different:
            raise ModelError(
                f"the node {socket.gethostname()} has another {different} than the machine that started the job; give "
                "all nodes the same files, or pass the model itself"
            )
        return begin(loaded)  # type: ignore[no-any-return]


def _on_pieces(begin: Callable[[LoadedModel], Work], model: LoadedModel) -> Work:
    """Return a function that computes pieces, which come and go as bytes: Ray Data knows columns only."""
    work = begin(model)

    def results(block: Any) -> Any:
        done = []
        for piece in block.column("piece").to_pylist():
            try:
                done.append(pickle.dumps(work(pickle.loads(piece))))
            except Exception as error:  # returned, since Ray would drop earlier results that are still on their way
                done.append(pickle.dumps(error))
        return arrow_table([{"result": result} for result in done])

    return results


def _on_files(options: Mapping[str, Any], model: LoadedModel) -> Work:
    """Return a function that explains the files of a piece; the rows leave without the pictures."""

    def rows(files: Sequence[Path]) -> list[Explanation | Failure]:
        explained = explain_many(model, files, on_error="yield", **options)
        return [row if isinstance(row, Failure) else row.released(Path(row.source)) for row in explained]

    return rows


def _on_batches(options: Mapping[str, Any], model: LoadedModel) -> Work:
    """Return a function that explains the pictures of a dataset's batch, and returns the rows as pyarrow's table."""

    def rows(batch: Mapping[str, np.ndarray]) -> Any:
        unread: list[Failure] = []
        explained = explain_many(model, _pictures(batch, unread), on_error="yield", **options)
        found = [row_of(row) if isinstance(row, Explanation) else row_of_failure(row) for row in explained]
        return arrow_table([*found, *map(row_of_failure, unread)], arrow_schema())

    return rows


def _pictures(batch: Mapping[str, np.ndarray], unread: list[Failure]) -> Iterator[str | Image.Image]:
    """Yield the file of each picture, or the picture; note those that cannot be read."""
    column = next((name for name in ("bytes", "image", "path") if name in batch), "")
    if not column:
        raise InputError(
            f"the dataset has the columns {', '.join(batch)}; camkit needs 'path', 'bytes' or 'image' with the pictures"
        )
    if column == "path":
        yield from map(str, batch["path"])
        return
    for name, data in zip(batch.get("path", itertools.repeat("")), batch[column], strict=False):
        source = str(name or digest(bytes(data))[:32])
        try:
            picture = from_array(data) if column == "image" else open_picture(source, data)
        except CamkitError as error:
            unread.append(Failure(source, error))
            continue
        picture.filename = source  # type: ignore[attr-defined]  # becomes the source of the explanation
        yield picture


@contextlib.contextmanager
def connected(address: str | None, *, quiet: bool = True) -> Iterator[None]:
    """Connect to a cluster while a ``with`` block runs. How much Ray prints stays as the first block sets it.

    Args:
        address: as ``ray.init`` takes it, such as "auto" or "10.0.0.1:6379"; None takes the cluster in RAY_ADDRESS, or
            one that runs on this machine, or starts one with all its cores.
        quiet: whether Ray's own messages are left out.

    Raises:
        InputError: Ray is not installed, or no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if quiet:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    ray = import_ray()
    is_own = not ray.is_initialized()
    if is_own and address not in (None, "auto", "local"):  # Ray's own names for the cluster here, and for a new one
        _refuse_unreachable(address)
    if quiet:
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    if is_own:
        where = f"the cluster at {address}" if address else "a cluster on this machine"
        options = {} if address else {"include_dashboard": False}
        with as_error(InputError, lambda error: f"camkit cannot use {where}: {brief(error)}"):
            ray.init(address, log_to_driver=not quiet, logging_level=logging.ERROR, **options)
    try:
        yield
    finally:
        if is_own:
            ray.shutdown()


def _refuse_unreachable(address: str) -> None:
    """Try to connect, because Ray itself tries for minutes and prints a lot."""
    named = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address)
    if named is None:
        raise InputError(f"{address!r} is not the address of a Ray cluster; pass auto, host:port or ray://host:port")
    said = f"no Ray cluster answers at {address}: "
    with as_error(InputError, lambda error: f"{said}{getattr(error, 'strerror', None) or error}"):
        # How long to wait until a cluster answers
        socket.create_connection((named[1], int(named[2])), 10.0).close()


def import_ray() -> Any:
    """Return Ray with Ray Data.

    Raises:
        InputError: it is not installed.
    """
    optional("ray.data", "explaining on a cluster needs Ray: pip install 'camkit[ray]'")
    return importlib.import_module("ray")
