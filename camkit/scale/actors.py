"""The processes of a cluster that hold a model: how they get it, how many there are, and how they share work.

Only this file and ``cluster.py`` import Ray, and only when somebody uses it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn

from camkit.engine.allocator import reuse_large_blocks
from camkit.errors import InputError, ModelError, RunError, brief
from camkit.explainer import Config
from camkit.models import as_model, load_model
from camkit.models.labels import Labels
from camkit.models.loaded import LoadedModel
from camkit.scale.fingerprint import Fingerprint, differences, fingerprint
from camkit.types import Preprocess

_SPARED = 1 / 8
"""The share of the cores, at least one core, that is left to the tasks that read a dataset. These tasks would wait
forever if actors held all cores."""
_CONNECT_SECONDS = 10.0
"""How long to wait until a cluster answers."""
_NAMED_CLUSTERS = ("auto", "local")
"""Ray's own names for the cluster that runs here, and for a new one."""
_SAME_ON_ALL_NODES = ("version of camkit", "network", "weights", "labels")
"""The parts of a fingerprint that must be the same on every node. A preprocessing may round differently on another
processor."""
_MOST_DEATHS = 3
"""At most this many actors may die on the same piece of work. A node that dies takes one actor with it, but pictures
that need too much memory kill every actor."""

Source: TypeAlias = nn.Module | str | LoadedModel | Callable[[], Any] | None
"""What a cluster accepts as a model: a module, a name, or a function that makes a module."""


@dataclass(frozen=True)
class ModelSource:
    """How a model reaches the actors; it is sent to each of them.

    Attributes:
        model: a name, a function that makes it, a LoadedModel, or the reference to one in the object store.
        arguments: the arguments that ``camkit.load_model`` gets with a name.
        config, preprocess, labels, device: as for ``camkit.explain``.
    """

    model: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    config: Config | None = None
    preprocess: Preprocess | None = None
    labels: Labels | None = None
    device: str | torch.device | None = None

    def load(self, device: str) -> LoadedModel:
        """Return the model on a device, unless the caller chose another."""
        model, device = self.model, str(self.device or device)
        if self.config is not None:
            from camkit.config.model import configured_model  # noqa: PLC0415 - few calls have a config
            from camkit.config.settings import as_settings  # noqa: PLC0415

            model = configured_model(model, as_settings(self.config).model, device=device)
        elif isinstance(model, str):
            model = load_model(model, device=device, **self.arguments)
        elif model is not None and not isinstance(model, (nn.Module, LoadedModel)):
            model = _made(model) if callable(model) else import_ray().get(model)
        loaded = as_model(model, preprocess=self.preprocess, labels=self.labels)
        return replace(loaded, module=loaded.module.eval().to(device))

    def sent(self, loaded: LoadedModel) -> ModelSource:
        """Return the source for the actors: a module is put into the object store."""
        if not isinstance(self.model, (nn.Module, LoadedModel)):
            return self
        try:
            return ModelSource(import_ray().put(loaded), device=self.device)
        except Exception as error:  # pickling fails with errors of many kinds
            raise ModelError(
                f"the model cannot be sent to the cluster ({brief(error)}); pass its name, or a function that makes it"
            ) from error


def _made(factory: Callable[[], Any]) -> nn.Module | LoadedModel:
    """Return the model that a function makes, with its preprocessing if it returns that too."""
    made = factory()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return LoadedModel(made[0].eval(), type(made[0]).__name__, made[1])
    if not isinstance(made, (nn.Module, LoadedModel)):
        raise ModelError(f"the function that makes the model returned {type(made).__name__}, not a torch.nn.Module")
    return made


@dataclass(frozen=True)
class Pool:
    """The actors of a job.

    Attributes:
        actors: how many there are.
        cpus, gpus: what each of them takes.
    """

    actors: int
    cpus: float
    gpus: float

    @classmethod
    def of_cluster(cls, actors: int | None, cpus: float, gpus: float | None, *, spare: bool = False) -> Pool:
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
        there = {"cores": resources.get("CPU", 0.0), "GPUs": resources.get("GPU", 0.0)}
        gpus = (1.0 if there["GPUs"] >= 1 else 0.0) if gpus is None else float(gpus)
        spared = max(1, math.floor(there["cores"] * _SPARED)) if spare and actors is None else 0
        room = math.floor(there["GPUs"] / gpus if gpus else (there["cores"] - spared) / cpus)
        pool = cls(actors or max(1, room), cpus, gpus)
        if room < pool.actors:
            beside = f" beside {_number(spared, 'core')} for the tasks that read" if spared else ""
            raise InputError(
                f"the cluster has {_number(there['cores'], 'core')} and {_number(there['GPUs'], 'GPU')}, too few for "
                f"{pool}{beside}"
            )
        return pool

    def __str__(self) -> str:
        """Return, for example, "2 actors with 1 core each"."""
        each = _number(self.gpus, "GPU") if self.gpus else _number(self.cpus, "core")
        return f"{_number(self.actors, 'actor')} with {each} each"

    @property
    def device(self) -> str:
        """Where the actors compute."""
        return "cuda" if self.gpus else "cpu"

    @property
    def threads(self) -> int | None:
        """The number of threads with which an actor computes; None leaves it to PyTorch."""
        return None if self.gpus else max(1, int(self.cpus))

    def resources(self) -> dict[str, float]:
        """Return what an actor takes, as Ray's arguments. An actor with a GPU also takes one core, Ray's default."""
        return {"num_gpus": self.gpus} if self.gpus else {"num_cpus": self.cpus}


def _number(count: int | float, thing: str) -> str:
    return f"{count:g} {thing}" + "s" * (count != 1)


def load_on_node(source: ModelSource, pool: Pool, made_with: Fingerprint) -> LoadedModel:
    """Load the model in an actor, and let it compute with the actor's cores.

    Args:
        source: the model.
        pool: what the actor may take.
        made_with: the fingerprint of the model where the job was started.

    Raises:
        ModelError: this node has another model.
    """
    reuse_large_blocks()
    if pool.threads is not None:
        torch.set_num_threads(pool.threads)
    loaded = source.load(pool.device)
    here = fingerprint(loaded)
    different = differences(*({name: made[name] for name in _SAME_ON_ALL_NODES} for made in (made_with, here)))
    if different:
        raise ModelError(
            f"the node {socket.gethostname()} has another {different} than the machine that started the job; give "
            "all nodes the same files, or pass the model itself"
        )
    return loaded


Work = TypeVar("Work")
Result = TypeVar("Result")


class Workers(Generic[Work, Result]):
    """Actors that share pieces of work while a ``with`` block runs.

    A piece whose actor dies is given to another one, and a new actor is started as soon as the cluster has room for it.

    Args:
        source: the model for the actors.
        model: the same model in this process; the models of the actors are compared with it.
        pool: how many actors there are at most, and what each of them takes.
        make: makes, from an actor's model, the function that does a piece of work; it is sent to the actors.
    """

    def __init__(
        self,
        source: ModelSource,
        model: LoadedModel,
        pool: Pool,
        make: Callable[[LoadedModel], Callable[[Work], Result]],
    ) -> None:
        self._ray = import_ray()
        self._pool = pool
        self._actor = self._ray.remote(_Actor).options(**pool.resources())
        self._made_from = self._ray.put((source, pool, fingerprint(model), make))
        self._starting: dict[Any, Any] = {}
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, int]] = {}

    def map(self, pieces: Iterable[Work]) -> Iterator[Result]:
        """Do pieces of work, and yield the results in the order in which they are finished.

        Raises:
            RunError: the actors die again and again on the same piece, or before they can begin.
            Exception: whatever an actor raises.
        """
        pieces = list(pieces)
        waiting = deque(range(len(pieces)))
        deaths: Counter[int | None] = Counter()
        while waiting or self._busy:
            self._start_actors(len(waiting))
            while waiting and self._idle:
                actor, number = self._idle.pop(), waiting.popleft()
                self._busy[actor.compute.remote(pieces[number])] = actor, number
            (finished,), _ = self._ray.wait([*self._starting, *self._busy], num_returns=1)
            has_begun = finished in self._busy
            actor, piece = self._busy.pop(finished) if has_begun else (self._starting.pop(finished), None)
            try:
                result = self._ray.get(finished)
            except self._ray.exceptions.RayTaskError as error:
                raise cause_of(error) from error
            except self._ray.exceptions.RayError as error:  # the actor, its node or its result is gone
                self._ray.kill(actor)
                deaths[piece] += 1
                if deaths[piece] == _MOST_DEATHS:
                    when = "before it could begin" if piece is None else "on the same pictures"
                    raise RunError(
                        f"a worker died {_MOST_DEATHS} times {when}, perhaps for lack of memory: {brief(error)}"
                    ) from error
                if piece is not None:
                    waiting.appendleft(piece)
                continue
            deaths[piece] = 0
            self._idle.append(actor)
            if piece is not None:
                yield result

    def _start_actors(self, waiting: int) -> None:
        """Start the actors that are missing, but no more than there are pieces waiting."""
        missing = self._pool.actors - len(self._starting) - len(self._idle) - len(self._busy)
        for _ in range(min(missing, waiting - len(self._starting) - len(self._idle))):
            actor = self._actor.remote(self._made_from)
            self._starting[actor.begin.remote()] = actor

    def __enter__(self) -> Workers[Work, Result]:
        """Return the workers themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the actors."""
        for actor in (*self._starting.values(), *self._idle, *(actor for actor, _ in self._busy.values())):
            self._ray.kill(actor)


class _Actor:
    """Holds a model and does pieces of work with it. Ray makes one in each process."""

    def __init__(self, made_from: tuple[ModelSource, Pool, Fingerprint, Callable[[LoadedModel], Any]]) -> None:
        self._made_from = made_from

    def begin(self) -> None:
        """Load the model here, so that its errors are raised by this call and not by the start of the actor."""
        source, pool, made_with, make = self._made_from
        self._compute = make(load_on_node(source, pool, made_with))

    def compute(self, piece: Any) -> Any:
        """Do a piece of work."""
        return self._compute(piece)


def cause_of(error: BaseException) -> BaseException:
    """Return what an actor raised, without Ray's report around it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


@contextlib.contextmanager
def connected(address: str | None, *, quiet: bool = True) -> Iterator[None]:
    """Connect to a cluster while a ``with`` block runs.

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
    if is_own and address is not None:
        _refuse_unreachable(address)
    context, log = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    before = context.enable_progress_bars, log.level
    try:
        if quiet:
            context.enable_progress_bars = False
            log.setLevel(logging.CRITICAL)
        if is_own:
            _start(ray, address, quiet=quiet)
        yield
    finally:
        context.enable_progress_bars = before[0]
        log.setLevel(before[1])
        if is_own:
            ray.shutdown()


def _start(ray: Any, address: str | None, *, quiet: bool) -> None:
    options = {} if address else {"include_dashboard": False}
    try:
        ray.init(address, log_to_driver=not quiet, logging_level=logging.ERROR, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = f"the cluster at {address}" if address else "a cluster on this machine"
        raise InputError(f"camkit cannot use {where}: {brief(error)}") from error


def _refuse_unreachable(address: str) -> None:
    """Try to connect, because Ray itself tries for minutes and prints a lot.

    Raises:
        InputError: nothing answers, or the text is not an address.
    """
    named = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address)
    if named is None:
        if address not in _NAMED_CLUSTERS:
            raise InputError(
                f"{address!r} is not the address of a Ray cluster; pass auto, host:port or ray://host:port"
            )
        return
    try:
        socket.create_connection((named[1], int(named[2])), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"no Ray cluster answers at {address}: {reason}") from error


def import_ray() -> Any:
    """Return Ray with Ray Data.

    Raises:
        InputError: it is not installed.
    """
    try:
        import ray  # noqa: PLC0415 - an extra, which only clusters need
        import ray.data  # noqa: PLC0415
    except ImportError as error:
        raise InputError("explaining on a cluster needs Ray: pip install 'camkit[ray]'") from error
    return ray
