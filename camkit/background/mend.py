"""``mend()``: train the last linear layer of a model anew, so that it relies less on the background.

Half of the groups of pictures mend: their objects are pasted on the backgrounds of all classes, the inputs of the last
linear layer are computed once, and the layer is trained on them. The other half prove: they are checked before and
after, and never used for mending. Retraining the last layer on data without the shortcut is often enough, since the
features before it know the object as well (Kirichenko et al. 2023, Last Layer Re-Training is Sufficient for Robustness
to Spurious Correlations, arXiv:2204.02937).
"""

from __future__ import annotations

import copy
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, Unpack

import numpy as np
import safetensors.torch
import torch
from torch import nn

from camkit.background.baseline import gap_change
from camkit.background.check import PlanOptions, finish_check, plan_check
from camkit.background.data import Item
from camkit.background.last_layer import (
    MOST_LOST,
    Pair,
    choose_strength,
    composites,
    export,
    find_last_linear,
    fit,
    inputs_of,
    trained_rows,
    worst_pair,
)
from camkit.background.plan import Plan, make_plan
from camkit.background.result import CheckResult
from camkit.errors import InputError, refuse_unknown_options, refusing_exit
from camkit.images.files import write_file
from camkit.kit.statistics import Estimate
from camkit.models.loaded import Loadable
from camkit.options import Run

__all__ = ["MendResult", "Pair", "mend"]

MendProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with the stage, the number of finished steps and the number of all steps."""


@dataclass(frozen=True, eq=False)
class MendResult:
    """A mended model, with its check before and after.

    Attributes:
        model: a copy of the model whose last linear layer is trained anew.
        layer: the name of that layer.
        before, after: the checks of the old and the new model, on pictures that mending did not use.
        mended_on: the names of the pictures that mending used.
        strength: how strongly the layer was pulled towards its old weights.
    """

    model: nn.Module
    layer: str
    before: CheckResult
    after: CheckResult
    mended_on: tuple[str, ...] = field(repr=False)
    strength: float

    @property
    def gaps(self) -> tuple[float | None, float | None]:
        """The gap of all classes together before and after: the mean over the fills; None if it was not measured."""
        return _gap_of(self.before), _gap_of(self.after)

    @property
    def gap_change(self) -> Estimate | None:
        """The change of the gap with its interval, picture by picture; None if it was not measured.

        With few groups of pictures, the ends of the interval are NaN.
        """
        before = {row.name: row for row in self.before.images}
        pairs = [(row, before[row.name]) for row in self.after.images if row.name in before]
        return gap_change(pairs, self.before.plan.settings.check.seed)

    @property
    def worst_before(self) -> Pair | None:
        """The class and background with the least accuracy before; None if no pair has enough pictures."""
        return _worst_pair_of(self.before)

    @property
    def worst_after(self) -> Pair | None:
        """The class and background with the least accuracy after; None if no pair has enough pictures."""
        return _worst_pair_of(self.after)

    @property
    def problem(self) -> str:
        """Why the mended model is no better than the old one; empty if it is."""
        if reason := nothing_to_mend(self.before):
            return reason
        lost = self.before.overall.accuracy.value - self.after.overall.accuracy.value
        if lost > MOST_LOST:
            return f"the accuracy on unedited pictures falls by {lost:.1%}"
        change, worst_before, worst_after = self.gap_change, self.worst_before, self.worst_after
        if change is None or not change.high < 0:  # of few groups, NaN
            figures = "the pictures come from too few groups"
            if change is not None and change.high >= 0:
                figures = f"it changes by {change.value:+.2f} (95% interval {change.low:+.2f} to {change.high:+.2f})"
            return f"the gap does not get smaller by more than chance: {figures}"
        if worst_before is not None and worst_after is not None and worst_after.accuracy < worst_before.accuracy:
            return "the worst pair of class and background gets worse"
        return ""

    def save(self, path: str | Path) -> None:
        """Write the mended weights: a state dict with the keys of the model's own, in the type that the suffix says.

        Raises:
            OutputError: the file cannot be written.
        """
        state = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
        if Path(path).suffix.lower() == ".safetensors":  # refuses tensors that share memory, such as tied weights
            own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
            write_file(Path(path), safetensors.torch.save(own))
            return
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_file(Path(path), buffer.getvalue())

    def __repr__(self) -> str:
        """Return a line with the verdicts before and after."""
        return f"<MendResult of {self.before.plan.model.name}: {self.before.verdict} -> {self.after.verdict}>"


@refusing_exit()
def mend(
    model: Loadable | None = None,
    data: str | Path | None = None,
    *,
    progress: MendProgress | None = None,
    **options: Unpack[PlanOptions],
) -> MendResult:
    """Train the last linear layer of a classifier anew, so that it relies less on the background.

    The model itself stays as it is. Half of the groups of pictures are used for mending, and the other half for the
    checks before and after.

    Args:
        model, data: as for ``camkit.check``.
        progress: called with the stage, the number of steps done, and the number of steps in all.
        **options: as for ``camkit.check``.

    Returns:
        The mended copy, and both checks. ``problem`` says why there was nothing to mend, or why nothing was gained.

    Raises:
        InputError: the call or the data is wrong, the data has no regions, or the model has no last linear layer.

    Examples:
        >>> import camkit  # doctest: +SKIP
        >>> mended = camkit.mend("mine.py:build", "validation/")  # doctest: +SKIP
        >>> mended.problem or mended.save("mended.pth")  # doctest: +SKIP
    """
    refuse_unknown_options(mend, options, PlanOptions.__annotations__)
    return mended(plan_check(model, data, **options), progress or (lambda *_: None))


def nothing_to_mend(before: CheckResult) -> str:
    """Say why a model needs no mending: neither the gap nor an effect of a class is a finding; "" if one is."""
    effects = [
        own.effects.get(name) for own in before.judged.values() if not own.waived for name in ("gap", "attraction")
    ]
    if any(effect is not None and effect.level in ("fail", "warn") for effect in effects):
        return ""
    gap = _gap_of(before)
    return "there is nothing to mend: " + (
        "the gap could not be measured" if gap is None else f"the gap of {gap:.2f} is not a finding; no class has one"
    )


def check_before(plan: Plan, progress: MendProgress) -> CheckResult:
    """Check the model on the pictures that mending does not use. The errors are those of ``mend``."""
    to_prove = halves(plan)[1]
    find_last_linear(plan)
    return finish_check(to_prove, progress=_named("before", progress))


def mended(plan: Plan, progress: MendProgress, before: CheckResult | None = None) -> MendResult:
    """Mend the model of a planned check; ``check_before`` returns ``before``. The errors are those of ``mend``."""
    before = before or check_before(plan, progress)
    to_mend, to_prove = halves(plan)
    name = find_last_linear(plan)
    pasted = composites(to_mend, lambda done, of: progress("pasting", done, of))
    examples = inputs_of(to_mend, name, pasted)
    progress("training", 0, 1)
    strength = choose_strength(examples)
    module, rows = copy.deepcopy(plan.model.module), trained_rows(plan)
    layer = module.get_submodule(name)
    assert isinstance(layer, torch.nn.Linear)
    weight, bias = fit(examples, strength)
    with torch.no_grad():
        layer.weight[rows] = weight.to(layer.weight)
        if layer.bias is not None:
            layer.bias[rows] = bias.to(layer.bias)
    progress("training", 1, 1)
    of_mended = replace(to_prove, model=replace(plan.model, module=module))
    after = finish_check(of_mended, progress=_named("after", progress))
    return MendResult(module, name, before, after, tuple(item.name for item in to_mend.data.items), strength)


def export_composites(plan: Plan, folder: Path, progress: MendProgress) -> int:
    """Write the pictures that would mend the model of a planned check, and return how many there are.

    Raises:
        InputError, OutputError: as for ``mend``, or a file cannot be written.
    """
    return export(halves(plan)[0], folder, lambda done, of: progress("pasting", done, of))


def _named(when: str, progress: MendProgress) -> Callable[[str, int, int], None]:
    return lambda stage, done, of: progress(f"{when}: {stage}", done, of)


def halves(plan: Plan) -> tuple[Plan, Plan]:
    """Divide the pictures of each class by their groups, for mending and for proving; no group is in both.

    Raises:
        InputError: the data has no regions, or a class has fewer than two groups.
    """
    if plan.detects:
        raise InputError("camkit mends the last linear layer of a classifier, and this model is a detector")
    if not plan.with_regions:
        raise InputError("mending pastes objects on other backgrounds, and this data has no regions of objects")
    labels: dict[str, Counter[str]] = defaultdict(Counter)
    for item in plan.data.items:
        labels[item.group][item.label] += 1
    groups: dict[str, list[str]] = defaultdict(list)
    for group, counts in labels.items():
        groups[counts.most_common(1)[0][0]].append(group)
    few = next((label for label in plan.data.classes if len(groups[label]) < 2), None)
    if few is not None:
        raise InputError(f"class {few!r} needs two groups of pictures, one for training and one for testing")
    rng = np.random.default_rng(plan.settings.check.seed)
    chosen = {name for label in sorted(groups) for name in rng.permutation(groups[label])[::2].tolist()}
    parts = [[item for item in plan.data.items if (item.group in chosen) == is_chosen] for is_chosen in (True, False)]
    return _with_items(plan, parts[0]), _with_items(plan, parts[1])


def _with_items(plan: Plan, items: Sequence[Item]) -> Plan:
    """Return the plan for some of the pictures, without reports."""
    data = replace(plan.data, items=tuple(items))
    settings = plan.settings.model_copy(update={"run": Run()})
    return make_plan(plan.model, data, plan.matched, settings, plan.today)


def _gap_of(result: CheckResult) -> float | None:
    gap = result.overall.gap
    return None if gap.mean is None else gap.value


def _worst_pair_of(result: CheckResult) -> Pair | None:
    shown = [(row.label, background, right) for row in result.images for background, right in row.by_background.items()]
    pairs = [(label, background) for label, background, right in shown for _ in right]
    return worst_pair(pairs, [each for *_, right in shown for each in right])
