"""What commands share while they run: the model, a cluster, TensorBoard's events, and files that exist already."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import camkit
from camkit.cli.terminal import TALK, say
from camkit.errors import OutputError, refuse
from camkit.explaining.explainer import loading
from camkit.kit.store import fingerprint
from camkit.models import device_of, load_model
from camkit.models.loaded import LoadedModel
from camkit.options import Model
from camkit.scale.cluster import Cluster, Pool, connected

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def load(source: Model, *, pretrained: bool = True, trainable: bool = False) -> LoadedModel:
    """Load the model that the options name, and say what the user should know about it."""
    given = {**loading(source), "pretrained": pretrained, "trainable": trainable}
    loaded = load_model(source.name or "", device=source.device, **given)
    if loaded.note:
        say(loaded.note)
    if TALK.verbose:
        parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
        say(f"{loaded.name}: {parameters:,} parameters on {device_of(loaded.module)}", "dim")
    return loaded


@contextmanager
def actors_of(ray: bool | str) -> Iterator[Pool | None]:
    """Connect to the cluster that ``--ray`` names, and yield the actors that it has room for; None without ``--ray``.

    Raises:
        InputError: Ray is not installed, no cluster answers, or it has no room.
    """
    if ray is False:
        yield None
        return
    with connected(None if ray is True else ray, quiet=not TALK.verbose):
        pool = Pool.of_cluster()
        say(str(pool))
        yield pool


def on_cluster(source: Model, pool: Pool, loaded: LoadedModel) -> Cluster:
    """Return actors that load the model; ``loaded`` is the same model in this process."""
    make = functools.partial(load_model, source.name or "", **loading(source))
    return Cluster(pool, make, fingerprint(loaded), source.device)


@contextmanager
def events_into(folder: Path | None) -> Iterator[SummaryWriter | None]:
    """Open a writer of TensorBoard event files before anything is computed; yield None if there is no folder."""
    if folder is None:
        yield None
        return
    usual_hook = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        """Pass on all but what TensorBoard's own thread fails to write: closing the events reports that."""
        is_writer = type(failed.thread).__module__.startswith("tensorboard.")
        if not (is_writer and isinstance(failed.exc_value, OSError)):
            usual_hook(failed)

    with mock.patch.object(threading, "excepthook", hook), camkit.tensorboard.opened(folder) as events:
        yield events


def need_pictures(pictures: Sequence[object], example: str) -> None:
    """Refuse a command without pictures.

    Raises:
        InputError: there is none.
    """
    refuse((not pictures, f"name at least one picture: camkit {example} --model resnet50"))


def refuse_existing(file: Path, option: str, *, overwrite: bool) -> None:
    """Refuse to replace a file without ``--overwrite``.

    Raises:
        OutputError: it exists, and may not be replaced.
    """
    exists = f"{file} exists already; name another file with {option}, or pass --overwrite"
    refuse((file.exists() and not overwrite, exists), kind=OutputError)
