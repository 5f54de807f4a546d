"""The groups of options, those that several commands share, and the config's values for those that are not typed."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

from cyclopts import App, Group, Parameter
from cyclopts.argument import ArgumentCollection, update_argument_collection

import camkit
from camkit import options
from camkit.cli.terminal import TALK, say
from camkit.errors import InputError, as_error, refuse

if TYPE_CHECKING:
    import numpy as np

    from camkit.targets import BoxAtTarget, Target, TargetLike, TopTarget


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


class OptionalModel(options.Model):
    """A model that need not be named."""


class Detector(options.Model):
    """The detector whose boxes ``camkit regions`` outlines."""

    name: Annotated[
        str | None,
        options.Option(
            "Outline what this detector finds; name it as for --model of the other commands.", "NAME", name="boxes-of"
        ),
    ] = None


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
        """Let the command print as much, in all threads.

        Raises:
            InputError: ``quiet`` and ``verbose`` are both given.
        """
        if self.quiet and self.verbose:
            raise InputError("--quiet and --verbose cannot be combined")
        vars(TALK).update(vars(self))


def refuse_fractions(_: App, __: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse a fraction if the option takes a whole number. cyclopts calls this before it would round the fraction.

    Raises:
        InputError: an option for a whole number has a fraction.
    """
    for argument in arguments:
        for token in argument.tokens if int in (argument.hint, *get_args(argument.hint)) else ():
            if re.fullmatch(r"[+-]?\w+", token.value) is None:
                raise InputError(f"{token.keyword} takes a whole number, not {token.value}")


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Parse an option of numbers separated by commas."""
    with as_error(InputError, lambda _: f"--{name} takes numbers separated by commas, not {text!r}"):
        return tuple(float(part) for part in text.split(","))


@Parameter(name="*", group=TARGET)
@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What to explain; without any option, each picture's best class.

    Attributes:
        target: The class to explain: its label, or its index if no label is that number; repeat the option for several.
            Default: the best class.
        top_k: Explain the K best classes, or boxes, of each picture.
        above: Explain every class of a multi-label model whose probability (sigmoid) is above this.
        true: The true class of the picture; for --style slide.
        versus: Explain the target rather than this class.
        direction: Explain what raises or lowers one number of the output (one-logit model, regression).
        threshold: Explain all boxes of a detector whose score is above this, from 0 to 1; the default for detectors
            loaded by name, with 0.5.
        box: Explain the detector's box with this number; numbers start at 0.
        box_at: Explain the detector's box around this point x,y, in pixels of the picture; with --target, a box of this
            class. If no box there scores above --threshold, explain the best candidate, and say what holds it back.
        near: Explain the box that overlaps most with left,top,right,bottom, in pixels of the model's input.
        region: Explain the mean of a map of numbers, such as depth, in left,top,right,bottom, in pixels of the picture;
            --direction down explains what lowers it.
        part: Explain where one side of the box lies, its objectness or its mask, in place of the score of its class.
        point: Explain the mask of what lies at this point x,y, in pixels of the picture, for networks such as SAM.
        box_prompt: Explain the mask of what lies in left,top,right,bottom, in pixels of the picture, for networks such
            as SAM.
        mask: Explain the target of a segmentation network inside the object of this mask picture.
        everywhere: Explain the target of a segmentation network everywhere, not only where it is predicted.
        similar_to: Explain what makes the embedding similar to that of this picture.
    """

    target: Annotated[list[str] | None, Parameter(alias="-t", negative=(), metavar="CLASS")] = None
    top_k: Annotated[int | None, Parameter(alias="-k", metavar="K")] = None
    above: Annotated[float | None, Parameter(metavar="SHARE")] = None
    true: Annotated[str | None, Parameter(metavar="CLASS")] = None
    versus: Annotated[str | None, Parameter(metavar="CLASS")] = None
    direction: Literal["up", "down"] | None = None
    threshold: Annotated[float | None, Parameter(metavar="SCORE")] = None
    box: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    box_at: Annotated[str | None, Parameter(metavar="X,Y")] = None
    near: Annotated[str | None, Parameter(metavar="L,T,R,B")] = None
    region: Annotated[str | None, Parameter(metavar="L,T,R,B")] = None
    part: Literal["left", "top", "right", "bottom", "objectness", "mask"] | None = None
    point: Annotated[str | None, Parameter(metavar="X,Y")] = None
    box_prompt: Annotated[str | None, Parameter(metavar="L,T,R,B")] = None
    mask: Annotated[Path | None, Parameter(metavar="FILE")] = None
    everywhere: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    similar_to: Annotated[Path | None, Parameter(metavar="FILE")] = None

    def targets(self, mask: np.ndarray | None = None) -> list[TargetLike] | None:
        """Return the targets; None for each picture's best class, or for all boxes of a detector.

        Args:
            mask: the object of the file ``mask``, over the model's input (h, w); None before it is read.

        Raises:
            InputError: an option is wrong, two exclude each other, or one needs another.
        """
        names = self.target or []
        kinds = [f"--{name.replace('_', '-')}" for name in _ALONE if getattr(self, name) is not None]
        refined = {"--direction": self.region, "--threshold": self.box_at}
        kinds = [kind for kind in kinds if refined.get(kind) is None]
        # Options that refine one --target
        refinements = [
            f"--{name}" for name in ("versus", "mask", "everywhere") if getattr(self, name) not in (None, False)
        ]
        directed = ["--direction"] * (self.direction is not None)
        of_class = ["--target"] * bool(names and kinds not in (directed, ["--box-at"]))
        has_box = names or {"--box", "--box-at", "--near"} & set(kinds)
        refuse(
            (
                names and kinds == ["--threshold"],
                "--threshold and --target cannot be combined; leave out --threshold for the best box of the class, or "
                "add --box-at for a box at a point",
            ),
            *(
                (len(together) > 1, f"{' and '.join(together)} cannot be combined")
                for together in ([*kinds, *of_class], [*refinements, *directed])
            ),
            (
                self.part is not None and not has_box,
                "--part is a part of one box; name the box with --box, --box-at, --near or --target",
            ),
            (refinements and len(names) != 1, f"{' '.join(refinements[:1])} needs one --target"),
        )
        for option, make in _ALONE.items():
            if getattr(self, option) is not None:
                made = make(self)
                return list(made) if isinstance(made, list) else [made]
        return [self._class_target(name, mask) for name in names] or None

    def _numbers(self, name: str, form: str = "left,top,right,bottom") -> tuple[float, ...]:
        """Return the numbers in an option that takes them in this form."""
        option, text = name.replace("_", "-"), getattr(self, name)
        found = numbers(option, text)
        if len(found) != len(form.split(",")):
            raise InputError(f"--{option} takes {form}, not {text!r}")
        return found

    def _direction_target(self) -> Target:
        """Return a target for one number of the output, by default the first."""
        first, *others = self.target or ["0"]
        if others or not first.isdecimal():
            raise InputError("--direction explains one number of the output, so --target takes one index")
        return camkit.targets.direction("+" if self.direction == "up" else "-", int(first))

    def _class_target(self, name: str, mask: np.ndarray | None) -> TargetLike:
        if self.part is not None:
            return camkit.targets.best_box(name, part=self.part)
        if self.versus is not None:
            return camkit.targets.contrast(name, self.versus)
        segments = mask is not None or self.everywhere
        return camkit.targets.segment(name, mask, everywhere=self.everywhere) if segments else name


_ALONE: dict[str, Callable[[TargetOptions], TargetLike | list[TopTarget] | list[BoxAtTarget]]] = {
    "top_k": lambda options: camkit.targets.top(options.top_k or 0),
    "above": lambda options: camkit.targets.above(options.above or 0),
    "region": lambda options: camkit.targets.region(
        *options._numbers("region"), sign="-" if options.direction == "down" else "+"
    ),
    "direction": TargetOptions._direction_target,
    "box_at": lambda options: [
        camkit.targets.box_at(
            *options._numbers("box_at", "x,y"),
            label=label,
            threshold=0.5 if options.threshold is None else options.threshold,
            part=options.part,
        )
        for label in options.target or (None,)
    ],
    "threshold": lambda options: camkit.targets.boxes(options.threshold or 0),
    "box": lambda options: camkit.targets.box(options.box, part=options.part),
    "point": lambda options: camkit.targets.mask_at(*options._numbers("point", "x,y")),
    "box_prompt": lambda options: camkit.targets.mask_in(*options._numbers("box_prompt")),
    "near": lambda options: camkit.targets.box(near=options._numbers("near"), part=options.part),
    "similar_to": lambda options: camkit.targets.similar_to(options.similar_to),
}
"""What each option that chooses another kind of target makes; they exclude each other."""


def _size(name: str, text: str) -> int | list[int]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(map(str.isdecimal, sides)):
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
    for declared in fields(table):
        name, default = declared.name, declared.default
        option = options.options_of(table)[name]
        required, text = option.name == "model", option.help
        if required and table is OptionalModel:
            required, text = False, "The model, as --model of the other commands takes it."
        if says_default and isinstance(default, (int, float, str)) and not isinstance(default, bool):
            text += f" Default: {default if isinstance(default, str) else format(default, 'g')}."
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
            converter=functools.partial(lambda name, _, tokens: _PARSERS[name](name, tokens[0].value), name)
            if name in _PARSERS
            else None,
        )
        kind = hints[name] if option.shell is None else Any if name in _PARSERS else option.shell
        usual = field() if required else field(default=default)
        made.append((name, Annotated[kind, parameter], usual))
    own = {"__module__": __name__}  # cyclopts takes classes of the standard library as they are
    return Parameter(name="*")(
        make_dataclass(table.__name__, made, bases=(table,), namespace=own, frozen=True, kw_only=True)
    )


_IN_SHELL: dict[type, type] = {
    options.Model: _in_shell(options.Model, MODEL),
    OptionalModel: _in_shell(OptionalModel, MODEL),
    Detector: _in_shell(Detector, MODEL),
    options.Against: _in_shell(options.Against, MODEL),
    options.Explain: _in_shell(options.Explain, METHOD),
    options.Results: _in_shell(options.Results, OUTPUT),
    options.Diagnose: _in_shell(options.Diagnose, METHOD),
    options.Data: _in_shell(options.Data, DATA),
    options.Check: _in_shell(options.Check, EXPERIMENT, says_default=True),
    options.Limits: _in_shell(options.Limits, LIMITS, says_default=True),
    options.Run: _in_shell(options.Run, RUN, says_default=True),
    options.Mend: _in_shell(options.Mend, LIMITS, says_default=True),
}
"""Each table as the shell takes it."""


def command(home: str) -> Callable[[Callable[..., None]], Callable[..., int | None]]:
    """Make a command of its signature: the function of the same name in the module ``camkit.cli.<home>`` does the work.

    The module is imported when the command runs, since it imports PyTorch. The shell sees the options of the tables
    among the parameters. The function returns the exit code if that may be another one than 0.
    """

    def of_signature(signature: Callable[..., None]) -> Callable[..., int | None]:
        hints = get_type_hints(signature, include_extras=True)
        tables = {name: _IN_SHELL[hint] for name, hint in hints.items() if isinstance(hint, type) and hint in _IN_SHELL}
        usual = signature.__kwdefaults__ or {}
        signature.__annotations__ = {**hints, **tables}
        signature.__kwdefaults__ = {**usual, **{name: table() for name, table in tables.items() if name in usual}}

        @functools.wraps(signature)
        def run(*arguments: Any, **typed: Any) -> int | None:
            given = inspect.signature(signature).bind(*arguments, **typed)
            given.apply_defaults()
            common = given.arguments.pop("common", None) or Common(quiet=given.arguments.pop("quiet", False))
            common.begin()
            work = getattr(importlib.import_module(f"camkit.cli.{home}"), signature.__name__)
            code: int | None = work(*given.args, **given.kwargs)
            return code

        return run

    return of_signature


_OF_CONFIG: dict[tuple[str, ...], tuple[str, ...]] = {
    **dict.fromkeys([(), ("explain",)], ("explain",)),
    ("export",): ("explain",),
    ("diagnose",): ("diagnose",),
    **dict.fromkeys([("check",), ("check", "init")], ("data", "check", "limits", "run")),
    ("mend",): ("data", "check", "mend"),
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
    model = settings.model.name
    if model is not None and not named and not models:  # the folder may be a stranger's
        from camkit.models import runs_code

        if runs_code(model):
            raise InputError(
                f"the model in {file} is Python code ({model}), and camkit does not run code from a config that you "
                f"did not name; if you trust this code, pass --config {file}"
            )
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


def _values(table: Any) -> dict[str, Any]:
    """Return the values that a table of the config sets, by option, as they would be typed."""
    names = {name: option.name or name for name, option in options.options_of(type(table)).items()}
    return {names[name]: _typed(name, value) for name, value in options.given_in(table).items()}


def _typed(name: str, value: Any) -> Any:
    if name in ("mean", "std"):
        return ",".join(map(str, value))
    if name == "size" and isinstance(value, list):
        return "x".join(map(str, value))
    return value if isinstance(value, (bool, int, float, list)) else str(value)
