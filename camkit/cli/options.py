"""The groups of options, those that several commands share, and the config's values for those that are not typed."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, make_dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_args, get_type_hints

from cyclopts import App, Group, Parameter
from cyclopts.argument import ArgumentCollection, update_argument_collection

from camkit import options
from camkit.cli.terminal import TALK, say, tell
from camkit.errors import InputError, OutputError, as_error
from camkit.options import given_in, options_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from camkit.models.loaded import LoadedModel
    from camkit.scale.cluster import Cluster, Pool


MODEL = Group.create_ordered("Model")
DATA = Group.create_ordered("Data")
TARGET = Group.create_ordered("What to explain")
METHOD = Group.create_ordered("How to explain")
EXPERIMENT = Group.create_ordered("Experiment")
LIMITS = Group.create_ordered("Limits")
RUN = Group.create_ordered("How to run")
OUTPUT = Group.create_ordered("Output")
GENERAL = Group.create_ordered("General")
"""The groups in which the help lists the options, in this order."""

Command = TypeVar("Command", bound=Callable[..., int])

Ray: TypeAlias = Annotated[
    bool | str,
    Parameter(
        group=RUN,
        negative=(),
        metavar="[ADDRESS]",
        show_default=False,
        help="Compute on a Ray cluster (extra camkit[ray]): auto, host:port or ray://host:port. Without an address, "
        "the one in RAY_ADDRESS or on this machine; if there is none, one is started with all cores of this machine.",
    ),
]


class Source(options.Model):
    """The model to load, and changes to its preprocessing."""

    def load(self, *, pretrained: bool = True, trainable: bool = False) -> LoadedModel:
        """Load the model, and say what the user should know about it."""
        from camkit.explaining.explainer import loading
        from camkit.models import device_of, load_model

        given = {**loading(self), "pretrained": pretrained, "trainable": trainable}
        loaded = load_model(self.name or "", device=self.device, **given)
        if loaded.note:
            say(loaded.note)
        parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
        tell(f"{loaded.name}: {parameters:,} parameters on {device_of(loaded.module)}")
        return loaded

    def on_cluster(self, pool: Pool, loaded: LoadedModel) -> Cluster:
        """Return actors that load the model; ``loaded`` is the same model in this process."""
        from camkit.explaining.explainer import loading
        from camkit.kit.store import fingerprint
        from camkit.models import load_model
        from camkit.scale.cluster import Cluster

        make = functools.partial(load_model, self.name or "", **loading(self))
        return Cluster(pool, make, fingerprint(loaded), self.device)


class OptionalSource(Source):
    """A model that need not be named."""


@Parameter(name="*", group=GENERAL)
@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command that loads a model takes.

    Attributes:
        config: A camkit.toml. Without it, camkit uses the camkit.toml in this folder, or [tool.camkit] in its
            pyproject.toml, but does not run Python code that they name.
        quiet: Print only errors and the results that you ask for: no notes, no progress, no summary.
        verbose: Print more about the model and the work, every error, and where the program failed.
    """

    config: Annotated[Path | None, Parameter(alias="-c", metavar="FILE")] = None
    quiet: Annotated[bool, Parameter(alias="-q", negative=(), show_default=False)] = False
    verbose: Annotated[bool, Parameter(alias="-v", negative=(), show_default=False)] = False

    def begin(self) -> None:
        """Set how much is printed.

        Raises:
            InputError: ``quiet`` and ``verbose`` are both given.
        """
        if self.quiet and self.verbose:
            raise InputError("--quiet and --verbose cannot be combined")
        TALK.set(quiet=self.quiet, verbose=self.verbose)


@contextmanager
def actors_of(ray: bool | str) -> Iterator[Pool | None]:
    """Connect to the cluster that ``--ray`` names, and yield the actors that it has room for; None without ``--ray``.

    Raises:
        InputError: Ray is not installed, no cluster answers, or it has no room.
    """
    if ray is False:
        yield None
        return
    from camkit.scale.cluster import Pool, connected

    with connected(None if ray is True else ray, quiet=not TALK.verbose):
        pool = Pool.of_cluster()
        say(str(pool))
        yield pool


@contextmanager
def events_into(folder: Path | None) -> Iterator[SummaryWriter | None]:
    """Open a writer of TensorBoard event files before anything is computed; yield None if there is no folder."""
    if folder is None:
        yield None
        return
    from camkit.tensorboard import opened

    usual_hook = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        """Pass on all but what TensorBoard's own thread fails to write: closing the events reports that."""
        is_writer = type(failed.thread).__module__.startswith("tensorboard.")
        if not (is_writer and isinstance(failed.exc_value, OSError)):
            usual_hook(failed)

    threading.excepthook = hook
    try:
        with opened(folder) as events:
            yield events
    finally:
        threading.excepthook = usual_hook


def refuse_fractions(_: App, __: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse a fraction if the option takes a whole number. cyclopts calls this before it would round the fraction.

    Raises:
        InputError: an option for a whole number has a fraction.
    """
    for argument in arguments:
        for token in argument.tokens if int in (argument.hint, *get_args(argument.hint)) else ():
            if not re.fullmatch(r"[+-]?\w+", token.value):
                raise InputError(f"{token.keyword} takes a whole number, not {token.value}")


def need_pictures(pictures: Sequence[object], example: str) -> None:
    """Refuse a command without pictures.

    Raises:
        InputError: there is none.
    """
    if not pictures:
        raise InputError(f"name at least one picture: camkit {example} --model resnet50")


def refuse_existing(file: Path, option: str, *, overwrite: bool) -> None:
    """Refuse to replace a file without ``--overwrite``.

    Raises:
        OutputError: it exists, and may not be replaced.
    """
    if file.exists() and not overwrite:
        raise OutputError(f"{file} exists already; name another file with {option}, or pass --overwrite")


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Parse an option of numbers separated by commas."""
    with as_error(InputError, lambda _: f"--{name} takes numbers separated by commas, not {text!r}"):
        return tuple(float(part) for part in text.split(","))


def _size(name: str, text: str) -> int | list[int]:
    sides = text.lower().split("x")
    if not all(side.isdecimal() for side in sides) or len(sides) > 2:
        raise InputError(f"--{name} takes a side in pixels, or height x width as in 224x336, not {text!r}")
    return int(sides[0]) if len(set(sides)) == 1 else [int(side) for side in sides]


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "size": _size,
    **dict.fromkeys(("mean", "std"), lambda name, text: list(numbers(name, text))),
}
"""What reads options that are typed as text."""


def _in_shell(table: type, group: Group, *, says_default: bool = False) -> type:
    """Return a table of options with the names, the help and the groups that it has in the shell.

    Args:
        table: the table.
        group: where the help lists options that are not about the output.
        says_default: whether the help says the defaults in words, because a config may change them.
    """
    hints = get_type_hints(table)
    made: list[tuple[str, Any, Any]] = []
    for field in fields(table):
        option, default = options.options_of(table)[field.name], field.default
        required, text = option.name == "model", option.help
        if required and table is OptionalSource:
            required, text = False, "The model that the config will name, as --model of the other commands takes it."
        if says_default and isinstance(default, (int, float, str)) and not isinstance(default, bool):
            text += f" Default: {default if isinstance(default, str) else format(default, 'g')}."
        parser = _PARSERS.get(field.name)
        parameter = Parameter(
            name=None if option.name is None else f"--{option.name}",
            alias=option.short,
            group=OUTPUT if option.is_output else group,
            negative=None if default is True else (),
            show_default=False if says_default or isinstance(default, bool) else None,
            parse=option.in_shell,
            help=text,
            metavar=option.metavar,
            required=required,
            converter=None if parser is None else functools.partial(_converted, parser, field.name),
        )
        kind = hints[field.name] if option.shell is None else option.shell if parser is None else Any
        usual = dataclass_field() if required else dataclass_field(default=default)
        made.append((field.name, Annotated[kind, parameter], usual))
    own = {"__module__": __name__}  # cyclopts takes classes of the standard library as they are
    return Parameter(name="*")(
        make_dataclass(table.__name__, made, bases=(table,), namespace=own, frozen=True, kw_only=True)
    )


def _converted(parser: Callable[[str, str], Any], name: str, _: Any, tokens: Sequence[Any]) -> Any:
    return parser(name, tokens[0].value)


_IN_SHELL: dict[type, type] = {
    Source: _in_shell(Source, MODEL),
    OptionalSource: _in_shell(OptionalSource, MODEL),
    options.Explain: _in_shell(options.Explain, METHOD),
    options.Results: _in_shell(options.Results, OUTPUT),
    options.Diagnose: _in_shell(options.Diagnose, METHOD),
    options.Data: _in_shell(options.Data, DATA),
    options.Check: _in_shell(options.Check, EXPERIMENT, says_default=True),
    options.Limits: _in_shell(options.Limits, LIMITS, says_default=True),
    options.Run: _in_shell(options.Run, RUN, says_default=True),
}
"""Each table as the shell takes it."""


def command(function: Command) -> Command:
    """Let the shell see the tables of options among a command's parameters."""
    hints = get_type_hints(function, include_extras=True)
    tables = {name: _IN_SHELL[hint] for name, hint in hints.items() if isinstance(hint, type) and hint in _IN_SHELL}
    usual = function.__kwdefaults__ or {}
    function.__annotations__ = {**hints, **tables}
    function.__kwdefaults__ = {**usual, **{name: table() for name, table in tables.items() if name in usual}}
    return function


_OF_CONFIG: dict[tuple[str, ...], tuple[str, ...]] = {
    **dict.fromkeys([(), ("explain",)], ("explain",)),
    ("diagnose",): ("diagnose",),
    **dict.fromkeys([("check",), ("check", "init")], ("data", "check", "limits", "run")),
    ("mend",): ("data", "check"),
}
"""The config's tables whose keys are options of a command; the table ``model`` holds for all commands."""


def fill_in(_: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Add the config's values to the options that were not typed, and print its name.

    cyclopts calls this before it converts the options.

    Raises:
        InputError: the config cannot be read, has an unknown key or an invalid value, or was found and names code.
    """
    options = {name: argument for argument in arguments for name in argument.names}
    if "--config" not in options:
        return

    def typed(option: str) -> list[str]:
        return [token.value for token in options[option].tokens] if option in options else []

    from camkit.options.toml import find_config

    # A config that lies in the folder already says nothing about the one that ``camkit check init`` is to write.
    named = [Path(name) for name in typed("--config")]
    file = named[-1] if named else find_config(Path()) if commands != ("check", "init") else None
    if file is None:
        return
    from camkit.options.settings import read_config

    settings, models = read_config(file), typed("--model")
    if not named and not models:
        _refuse_code(settings.model.name, file)
    if not options["--quiet"].tokens:
        here = "" if named else " in this folder; to use another, pass --config FILE"
        say(f"using the config {file}{here}")
    values: dict[str, Any] = {"config": str(file)}
    if not models or settings.model.describes(models[-1]):
        values |= _values(settings.model)
    for table in _OF_CONFIG.get(commands, ()):
        values |= _values(getattr(settings, table))
    if {"references", "layer"} & values.keys() and "check" not in _OF_CONFIG.get(commands, ()):
        # References that no method uses, and a layer that no typed method reads, are left out.
        from camkit.methods import METHODS

        names = typed("--method")
        methods = [METHODS[name] for name in names or [str(values.get("method"))] if name in METHODS]
        if not any(method.compares for method in methods):
            values.pop("references", None)
        if names and methods and not any(method.layer for method in methods):
            values.pop("layer", None)
    given = {name.replace("_", "-"): value for name, value in values.items()}
    known = {name: value for name, value in given.items() if f"--{name}" in options}
    # cyclopts' own class for this leaves out options that are called like a command, such as scale.
    update_argument_collection(known, str(file), arguments, root_keys=(), allow_unknown=False)


def _refuse_code(model: str | None, file: Path) -> None:
    """Refuse a config that nobody named if its model is Python code: the folder may be a stranger's."""
    if model is None:
        return
    from camkit.models import runs_code

    if runs_code(model):
        raise InputError(
            f"the model in {file} is Python code ({model}), and camkit does not run code from a config that you did "
            f"not name; if you trust this code, pass --config {file}"
        )


def _values(table: Any) -> dict[str, Any]:
    """Return the values that a table of the config sets, by option, as they would be typed."""
    names = {name: option.name or name for name, option in options_of(type(table)).items()}
    return {names[name]: _typed(name, value) for name, value in given_in(table).items()}


def _typed(name: str, value: Any) -> Any:
    if name in ("mean", "std"):
        return ",".join(map(str, value))
    if name == "size" and isinstance(value, list):
        return "x".join(map(str, value))
    return value if isinstance(value, (bool, int, float, list)) else str(value)
