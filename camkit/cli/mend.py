"""``camkit mend``: train the last linear layer of a refused model anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from camkit.cli.check import settings_of
from camkit.cli.options import DATA, OUTPUT, Common, Source, command
from camkit.cli.terminal import TALK, emit, say
from camkit.errors import InputError, printable
from camkit.options import Check, Data

if TYPE_CHECKING:
    from camkit.background.mend import MendResult, Pair

_NOTHING_GAINED = 1
"""The exit code if the weights are not written because the mended model is no better."""


@command
def mend(
    data: Annotated[Path | None, Parameter(group=DATA)] = None,
    *,
    source: Source,
    pictures: Data = Data(),
    experiment: Check = Check(),
    out: Annotated[Path | None, Parameter(alias="-o", group=OUTPUT, metavar="FILE")] = None,
    export: Annotated[Path | None, Parameter(group=OUTPUT, metavar="FOLDER")] = None,
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    force: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> int:
    """Train the last linear layer of a classifier anew, so that it relies less on the background.

    Half of the groups of pictures mend, and the other half are checked before and after. Exit codes: 0 the weights are
    written; 1 nothing was gained, and no weights are written; 2 the call or the data is wrong; 4 the model or the
    program failed.

    Args:
        data: The pictures with the regions of their objects, as for the check.
        out: The file for the mended weights, a state dict such as --weights takes. Default: mended.pth.
        export: Instead of mending, write the pasted pictures into this folder, to train the model on them.
        overwrite: Replace the file if it exists.
        force: Write the weights even if nothing was gained.
    """
    from camkit.background.check import plan_check
    from camkit.background.forecast import estimate_seconds
    from camkit.background.mend import check_before, export_composites, halves, mended, nothing_to_mend
    from camkit.background.report.words import sentence
    from camkit.cli.bars import stages
    from camkit.images.files import check_folder, refuse_input
    from camkit.kit.wording import in_words

    common.begin()
    file = Path("mended.pth") if out is None else out
    target = file if export is None else export / "labels.csv"
    if export is not None and out is not None:
        raise InputError("--export writes pictures and no weights; leave out --out")
    if target.exists() and not overwrite:
        raise InputError(f"{target} exists already; name another place, or pass --overwrite")
    check_folder(target.parent)
    settings = settings_of(common.config, data, pictures, check=experiment, run={"out": export})
    refuse_input(target, [settings.data.regions, settings.data.class_map, *source.files()])
    plan = plan_check(source.load(), config=settings)
    if export is not None:
        with stages() as progress:
            count = export_composites(plan, export, progress)
        say(f"wrote {count} pictures and their table, {printable(str(target))}")
        return 0
    if not TALK.quiet:  # mending itself takes about as long as one of the checks
        say(f"two checks and the mending: {in_words(3 * estimate_seconds(halves(plan)[1]))}")
    with stages() as progress:
        before = check_before(plan, progress)
    problem = nothing_to_mend(before)
    if force or not problem:
        say(printable(problem or f"to mend: {sentence(before)}"))
        with stages() as progress:
            found = mended(plan, progress, before)
        _print(found)
        problem = found.problem
    if problem and not force:
        say(f"no weights are written: {problem}; --force writes them, and --export writes pictures to train on")
        return _NOTHING_GAINED
    found.save(file)
    say(f"wrote {printable(str(file))}")
    return 0


def _print(found: MendResult) -> None:
    before, after = found.before, found.after
    emit(f"{'':<12}{'before':<34}after")
    emit(f"{'verdict':<12}{before.verdict:<34}{after.verdict}")
    rows = {
        "accuracy": [f"{result.overall.accuracy.value:.1%}" for result in (before, after)],
        "gap": [_number(gap) for gap in found.gaps],
        "worst pair": [_pair(found.worst_before), _pair(found.worst_after)],
    }
    for name, (first, second) in rows.items():
        emit(printable(f"{name:<12}{first:<34}{second}"))
    emit(printable(f"layer {found.layer}, trained on {len(found.mended_on)} pictures; the figures are from the others"))


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _pair(pair: Pair | None) -> str:
    return "not measured" if pair is None else f"{pair.accuracy:.0%} ({pair.label} on {pair.background})"
