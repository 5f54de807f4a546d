"""``mend()``: train the last linear layer of a model anew, so that it relies less on the background.

Half of the groups of pictures mend: their objects are pasted on the backgrounds of all classes, the inputs of the last
linear layer are computed once, and the layer is trained on them. The other half prove: they are checked before and
after, and say how far the layer may go. Retraining the last layer on data without the shortcut is often enough, since
the features before it know the object as well (Kirichenko et al. 2023, Last Layer Re-Training is Sufficient for
Robustness to Spurious Correlations, arXiv:2204.02937).
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack, cast

import cv2
import numpy as np
import safetensors.torch
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from camkit.background.check import PlanOptions, finish_check, plan_check
from camkit.background.data import Item, grouped
from camkit.background.edits import Edit
from camkit.background.effects import OVERALL, Pair
from camkit.background.experiment import Experiment, batches_of_one_shape
from camkit.background.plan import Plan, make_plan
from camkit.background.probe import cross_validated, parts_of
from camkit.background.result import CheckResult, gap_change
from camkit.background.rule import reason_of
from camkit.background.showcase import in_levels
from camkit.engine.attach import forward_hooks, tensors_in
from camkit.engine.guard import interruptible
from camkit.engine.passes import quiet_pass, to_grid
from camkit.errors import InputError, LayerError, advice, as_cell, refuse_unknown_options, refusing_exit, text_of
from camkit.images.files import csv_line, write_file
from camkit.images.prepare import prepare
from camkit.images.regions import Shades
from camkit.kit.statistics import (
    MIN_GROUPS,
    Estimate,
    bootstrap_sums,
    effective_groups,
    group_numbers,
    mean_over_groups,
)
from camkit.models import device_of, dtype_of
from camkit.models.loaded import Loadable
from camkit.options import Run
from camkit.options.settings import as_settings
from camkit.targets import logits_of
from camkit.types import Layout

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
        lost: the share of unedited pictures that mending loses at most, with 95 % confidence.
        unknown: why the inputs of the layer do not suffice to recognise the objects; empty if they do.
    """

    model: nn.Module
    layer: str
    before: CheckResult
    after: CheckResult
    mended_on: tuple[str, ...] = field(repr=False)
    strength: float
    lost: float
    unknown: str

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
        allowed, change = self.before.plan.settings.mend.most_lost, self.gap_change
        worst_before, worst_after = self.worst_before, self.worst_after
        if not self.lost < allowed:
            enough = min(1.0, int(100 * self.lost + 1.001) / 100)
            more = advice(f"most_lost={enough:.2f}", f"--most-lost {enough:.2f}")
            reason = (
                f"mending may lose up to {self.lost:.1%} of the unedited pictures; the limit is {allowed:.1%}; "
                f"pass {more} or add pictures"
            )
        elif change is None or not change.high < 0:  # NaN for few groups
            figures = "the pictures come from too few groups"
            if change is not None and change.high >= 0:
                figures = f"it changes by {change.value:+.2f} (95% interval {change.low:+.2f} to {change.high:+.2f})"
            reason = f"the gap does not get smaller by more than chance: {figures}"
        elif worst_before is not None and worst_after is not None and worst_after.accuracy < worst_before.accuracy:
            reason = "the worst pair of class and background gets worse"
        return f"{reason}; {self.unknown}" if reason and self.unknown else reason

    def save(self, path: str | Path) -> None:
        """Write the mended weights: a state dict with the keys of the model's own, in the type that the suffix says.

        Raises:
            OutputError: the file cannot be written.
        """
        state, buffer = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}, io.BytesIO()
        if Path(path).suffix.lower() == ".safetensors":  # refuses tensors that share memory, such as tied weights
            own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
            buffer.write(safetensors.torch.save(own))
        else:
            torch.save(state, buffer)
        write_file(Path(path), buffer.getvalue())

    def __repr__(self) -> str:
        """Return a line with the verdicts before and after."""
        return f"<MendResult of {self.before.plan.model.name}: {self.before.verdict} -> {self.after.verdict}>"


@refusing_exit()
def mend(
    model: Loadable | None = None,
    data: Any = None,
    *,
    most_lost: float | None = None,
    progress: MendProgress | None = None,
    **options: Unpack[PlanOptions],
) -> MendResult:
    """Train the last linear layer of a classifier anew, so that it relies less on the background.

    It trains even if there is nothing to mend: ``problem`` then says why the result should not be used.

    The model itself stays as it is. Half of the groups of pictures are used for mending, and the other half for the
    checks before and after. The layer moves away from its old weights as long as it loses, with 95 % confidence, less
    than ``most_lost`` of the unedited pictures.

    Args:
        model, data: as for ``camkit.check``.
        most_lost: the share of unedited pictures that mending may lose. None uses the config's, which is 0.05 by
            default.
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
    options["config"] = as_settings(options.get("config")).with_options(
        named=lambda setting: setting.rpartition(".")[2], mend={"most_lost": most_lost}
    )
    mending, progress = Mending(plan_check(model, data, **options)), progress or (lambda *_: None)
    return mending.mended(progress, mending.check_before(progress), *mending.examples(progress))


def nothing_to_mend(before: CheckResult) -> str:
    """Say why there is nothing to mend, or why that is not decided; "" if the gap or a class's effect is a finding."""
    effects = [
        own.effects.get(name) for own in before.judged.values() if not own.waived for name in ("gap", "attraction")
    ]
    if any(effect is not None and effect.level in ("fail", "warn") for effect in effects):
        return ""
    overall, value = before.judged[OVERALL], _gap_of(before)
    reasons = [*overall.reasons, *(reason_of(effect) for effect in overall.effects.values() if effect.name == "gap")]
    if before.verdict == "PASS" or overall.effects["gap"].level == "excluded":
        return f"there is nothing to mend: {reasons[-1].text}"
    first = next(reason for reason in reasons if reason.step)
    return (
        f"the gap{'' if value is None else f' of {value:.2f}'} is not decided by the half of the pictures that is "
        f"checked: {first.text}; next, for each half: {first.step}"
    )


@dataclass(frozen=True, eq=False)
class Examples:
    """What the layer is trained on.

    Attributes:
        features: the inputs of the layer.
        own: which of the trained outputs are those of the example's class.
        fixed: the logits of the other outputs, which stay as they are, and -inf.
        weights: of each example in the loss; they sum to 1 over the half that mends, and are 0 in the one that proves.
        pairs: the example's class and the class of its background.
        original: whether the picture is unedited.
        groups: the group of the example's picture.
        parts: the part of the groups that the example belongs to, or PROVING.
        before: the trained rows of the layer's weights and biases.
    """

    features: Float[Tensor, "n d"]
    own: Bool[Tensor, "n k"]
    fixed: Float[Tensor, "n o"]
    weights: Float[Tensor, " n"]
    pairs: Sequence[tuple[str, str]]
    original: Bool[Tensor, " n"]
    groups: Sequence[str]
    parts: Int[Tensor, " n"]
    before: tuple[Float[Tensor, "k d"], Float[Tensor, " k"]]

    def right(self, tensors: tuple[Tensor, Tensor]) -> Bool[Tensor, " n"]:
        """Return which examples a layer with these trained rows classifies rightly."""
        logits = self.features @ tensors[0].T + tensors[1]
        best = logits.masked_fill(~self.own, -torch.inf).amax(1)
        return best > torch.cat([logits.masked_fill(self.own, -torch.inf), self.fixed], 1).amax(1)


PROVING = -1
"""Stands in place of a part's number for the half of the pictures that proves."""

ORIGINAL = "original"
"""Stands in place of a fill's name for a picture that is not edited."""

STRENGTHS = [10.0 ** (power / 2) for power in range(2, -7, -1)]
"""The strengths of the pull towards the old weights; the strongest comes first."""


class Mending:
    """The model of a planned check, and two halves of its pictures: one mends the model, the other proves that it did.

    The pictures of each class are divided by their groups; no group is in both halves. All methods raise the errors of
    ``mend``.

    Args:
        plan: the check.

    Raises:
        InputError: the model is a detector, the data has no regions, or a class has fewer than two groups.
    """

    def __init__(self, plan: Plan) -> None:
        if plan.detects or not plan.with_regions:
            needs = (
                "works only for classifiers" if plan.detects else "needs the objects' regions, and this data has none"
            )
            raise InputError(f"mending {needs}")
        labels: dict[str, Counter[str]] = defaultdict(Counter)
        for item in plan.data.items:
            labels[item.group][item.label] += 1
        groups = grouped(labels, lambda group: labels[group].most_common(1)[0][0])
        few = next((label for label in plan.data.classes if len(groups.get(label, ())) < 2), None)
        if few is not None:
            raise InputError(f"class {few!r} needs two groups of pictures, one for training and one for testing")
        rng = np.random.default_rng(plan.settings.check.seed)
        chosen = {name for label in sorted(groups) for name in rng.permutation(groups[label])[::2].tolist()}
        settings = plan.settings.model_copy(update={"run": Run()})  # without reports
        self._plan, self._settings = plan, settings
        self._to_mend, self._to_prove = (
            make_plan(plan.model, replace(plan.data, items=items), plan.outputs, plan.matched, settings, plan.today)
            for items in (
                tuple(item for item in plan.data.items if item.group in chosen),
                tuple(item for item in plan.data.items if item.group not in chosen),
            )
        )
        # The outputs that the data has classes for. Their weights are trained; the others stay.
        self._rows = sorted({output for indices in plan.outputs.values() for output in indices})

    @functools.cached_property
    def _first_input(self) -> Float[Tensor, "1 c h w"]:
        first, module = self._plan.data.items[0], self._plan.model.module
        tensor = prepare(first.open(), self._plan.preprocess, first.name).tensor
        return tensor[None].to(device_of(module), dtype_of(module))

    @functools.cached_property
    def layer(self) -> str:
        """The name of the linear layer whose output is the model's. The model runs on one picture to find it.

        Raises:
            InputError: there is none.
        """
        module, picture = self._plan.model.module, self._first_input
        names: dict[nn.Module, str] = {
            layer: name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)
        }
        calls: defaultdict[str, list[Tensor]] = defaultdict(list)

        def note(layer: nn.Module, _: Any, output: Any) -> None:
            calls[names[layer]].append(output.detach())

        with quiet_pass(module, picture.device, "fp32"), interruptible(), forward_hooks(dict.fromkeys(names, note)):
            logits = logits_of(module(picture), 1)
        for name, outputs in calls.items():
            alike = len(outputs) == 1 and outputs[0].shape == logits.shape
            if alike and torch.allclose(outputs[0], logits, rtol=0, atol=1e-4 * float(logits.abs().max())):
                return name
        raise InputError(
            "the output of this model is not that of a linear layer, so it cannot be mended; write the pasted pictures "
            "with --export, and train the model on them"
        )

    def _checked(self, plan: Plan, when: str, progress: MendProgress) -> CheckResult:
        return finish_check(plan, progress=lambda stage, done, of: progress(f"{when}: {stage}", done, of))

    def check_before(self, progress: MendProgress) -> CheckResult:
        """Check the model on the pictures that mending does not use, if it has a last linear layer."""
        _ = self.layer  # refuses a model without one before the check runs
        return self._checked(self._to_prove, "before", progress)

    def _composites(self, progress: MendProgress) -> Iterator[tuple[Item, Shades, dict[Edit, Float[Tensor, "c h w"]]]]:
        """Yield each picture of the sample that mends, its black and white after preprocessing, and its inputs.

        These are the unedited picture, and its object on backgrounds of its own class and of other classes.
        """
        plan, others = self._to_mend, max(1, len(self._plan.data.classes) - 1)
        # Each object is pasted on at most this many backgrounds of other classes, and of its own class
        wanted = min(6, max(others, plan.settings.check.pastes))
        check = replace(plan.settings.check, pastes=wanted)
        experiment = Experiment(replace(plan, settings=plan.settings.model_copy(update={"check": check})))
        for number, item in enumerate(plan.sample):
            progress("pasting", number, len(plan.sample))
            picture = experiment.load(item)
            if picture is not None:
                made = {Edit("same", ORIGINAL, item.name): picture.tensor}
                edits = experiment.edits(item, wanted).items()
                yield (
                    item,
                    picture.shades,
                    made | {edit: make() for edit, make in edits if edit.arm in ("same", "other")},
                )

    def export(self, folder: Path, progress: MendProgress) -> int:
        """Write the pictures that would mend the model as PNG files, and return how many there are.

        ``labels.csv`` has the columns path, label, group, background and fill.

        Raises:
            OutputError: a file cannot be written.
        """
        lines = [csv_line(("path", "label", "group", "background", "fill"))]
        for item, shades, made in self._composites(progress):
            for edit, tensor in made.items():
                path = Path(item.label) / f"{len(lines):06d}.png"
                # Without the mark of a drawing, by which camkit would leave these pictures out of a folder.
                encoded = cv2.imencode(".png", in_levels(shades, tensor)[..., ::-1])[1]
                write_file(folder / path, encoded.tobytes())
                cells = path, item.label, item.group, self._plan.by_name[edit.lender].label, edit.fill
                lines.append(csv_line(as_cell(text_of(cell)) for cell in cells))
        write_file(folder / "labels.csv", lines)
        return len(lines) - 1

    def examples(self, progress: MendProgress) -> tuple[Examples, str]:
        """Return what the last layer is trained on, and why its inputs cannot tell the objects apart ("" if they can).

        The model runs once on each input of the half that mends, and on the pictures that prove.
        """
        plan, module = self._plan, self._plan.model.module
        try:
            stages = plan.memory.refreshed().decision(self._first_input).stages()
        except LayerError:  # of a model without maps, or whose layer the user names
            stages = ()
        layer = cast("nn.Linear", module.get_submodule(self.layer))
        modules = {module.get_submodule(stage.name): stage for stage in stages if stage.call is None}
        found, shown = list[Tensor](), list[tuple[Item, Edit]]()
        pooled: defaultdict[str, list[Tensor]] = defaultdict(list)

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if module is layer:
                found.append(inputs[0].detach())
            else:
                grid = to_grid(tensors_in(output)[0], cast("Layout", modules[module].layout))
                pooled[modules[module].name].append(grid.flatten(2).mean(2).float().cpu())

        proving = Experiment(self._to_prove)
        loaded = ((item, proving.load(item)) for item in self._to_prove.data.items)
        unedited = (((item, Edit("same", ORIGINAL, item.name)), own.tensor) for item, own in loaded if own)
        pasted = (
            ((item, edit), tensor) for item, _, made in self._composites(progress) for edit, tensor in made.items()
        )
        with forward_hooks(dict.fromkeys([layer, *modules], note)):
            for batch in batches_of_one_shape(itertools.chain(pasted, unedited), plan.batch_size):
                shown += [about for about, _ in batch]
                inputs = torch.stack([tensor for _, tensor in batch]).to(device_of(module), dtype_of(module))
                with quiet_pass(module, inputs.device, "fp32"), interruptible():
                    module(inputs)
        progress("probing", 0, 1)
        examples = self._examples_of(torch.cat(found).double().cpu(), shown, layer)
        outputs = {name: torch.cat(parts) for name, parts in pooled.items()}
        unknown = what_is_unknown(examples, outputs, plan.settings.check.seed)
        progress("probing", 1, 1)
        return examples, unknown

    def _examples_of(
        self, features: Float[Tensor, "n d"], shown: Sequence[tuple[Item, Edit]], layer: nn.Linear
    ) -> Examples:
        rows = self._rows
        pairs = [(item.label, self._plan.by_name[edit.lender].label) for item, edit in shown]
        original = torch.tensor([edit.fill == ORIGINAL for _, edit in shown])
        weight = layer.weight.detach().double().cpu()
        bias = torch.zeros(len(weight)).double() if layer.bias is None else layer.bias.detach().double().cpu()
        fixed = [row for row in range(len(weight)) if row not in rows]
        groups = [item.group for item, _ in shown]
        proving = {item.name for item in self._to_prove.data.items}
        mending = [row for row, (item, _) in enumerate(shown) if item.name not in proving]
        mends = [pairs[row] for row in mending]
        parts, weights = torch.full((len(shown),), PROVING), torch.zeros(len(shown), dtype=torch.float64)
        of_groups = [groups[row] for row in mending]
        parts[mending] = parts_of([label for label, _ in mends], of_groups, self._settings.check.seed)
        weights[mending] = _weights(mends, original[mending])
        return Examples(
            features,
            torch.tensor([[row in self._plan.outputs[label] for row in rows] for label, _ in pairs]),
            nn.functional.pad(features @ weight[fixed].T + bias[fixed], (0, 1), value=-torch.inf),
            weights,
            pairs,
            original,
            groups,
            parts,
            (weight[rows], bias[rows]),
        )

    def mended(self, progress: MendProgress, before: CheckResult, examples: Examples, unknown: str) -> MendResult:
        """Train the last layer of a copy of the model, and check it; ``check_before`` and ``examples`` give the rest.

        The layer is trained with less and less pull towards its old weights, as long as it loses few unedited pictures.
        Each part of the groups is predicted by a layer that was trained on the others, and the half that proves by the
        layer that is returned. A weaker pull is tried only if the stronger ones lose little enough, so that all tests
        together keep the confidence of one. If none does, the strongest pull is taken.
        """
        settings, original = self._settings, examples.original
        right = examples.right(examples.before).double()
        groups = [group for group, is_original in zip(examples.groups, original.tolist(), strict=True) if is_original]
        layers, found = dict.fromkeys(examples.parts.unique().tolist(), examples.before), None
        for number, strength in enumerate(STRENGTHS):
            progress("training", number, len(STRENGTHS))
            losses = right.clone()
            for part in layers:
                used, held_out = (examples.parts != part) & (examples.parts != PROVING), examples.parts == part
                layers[part] = fit(examples, strength, layers[part], used)
                losses[held_out] -= examples.right(layers[part])[held_out].double()
            lost = most_lost_of(losses[original].tolist(), groups, settings.check.seed)
            if found is None or lost < settings.mend.most_lost:
                found = *layers[PROVING], strength, lost
            if lost >= settings.mend.most_lost:
                break
        progress("training", len(STRENGTHS), len(STRENGTHS))
        assert found is not None
        weight, bias, strength, lost = found
        module = copy.deepcopy(self._plan.model.module)
        layer = cast("nn.Linear", module.get_submodule(self.layer))
        with torch.no_grad():
            layer.weight[self._rows] = weight.to(layer.weight)
            if layer.bias is not None:
                layer.bias[self._rows] = bias.to(layer.bias)
        to_prove = replace(self._to_prove, model=replace(self._plan.model, module=module))
        after = self._checked(to_prove, "after", progress)
        mended_on = tuple(item.name for item in self._to_mend.data.items)
        return MendResult(module, self.layer, before, after, mended_on, strength, lost, unknown)


def most_lost_of(losses: Sequence[float], groups: Sequence[str], seed: int) -> float:
    """Return the one-sided 95 % bound of a mean loss, by a bootstrap over groups. With few groups, it is 1.

    One more group is lost in it: otherwise the bound would be 0 if nothing is lost. This group counts as one picture if
    a lost picture says nothing about the others of its group, and as a whole group of mean size if these are always
    lost too, or if nothing is lost. If nothing is lost in n groups of one size, the bound is about 3 / n, as by the
    binomial distribution.
    """
    count, numbers = effective_groups(groups), group_numbers(groups)
    if count < MIN_GROUPS:
        return 1.0
    changed = np.abs(losses)
    possible = changed @ (np.bincount(numbers)[numbers] - 1)
    together = np.square(np.bincount(numbers, losses)).sum() - changed.sum()
    share = np.clip(together / possible, 0, 1) if possible else 1
    size = 1 + (len(groups) / count - 1) * share
    terms = np.column_stack([[*losses, size], [*np.ones(len(groups)), size]])
    sums = bootstrap_sums(terms, np.append(numbers, numbers.max() + 1), [seed, 4])
    return float(np.quantile(sums[:, 0] / sums[:, 1], 0.95))


def what_is_unknown(examples: Examples, stages: Mapping[str, Float[Tensor, "n d"]], seed: int) -> str:
    """Say why the inputs of the last layer do not suffice to recognise the objects; "" if they do.

    A linear layer on them predicts the class of pasted objects that it was not trained on, where each class is as often
    on its own backgrounds as on those of another class.

    Args:
        examples: what the last layer is trained on.
        stages: the mean outputs of the stages before the last layer, by name.
        seed: of the parts of the cross-validation and the bootstrap.
    """
    pasted = grouped((~examples.original).nonzero()[:, 0].tolist(), lambda row: examples.pairs[row])
    rows: list[int] = []
    for (label, background), of_pair in pasted.items():
        others = [len(of) for pair, of in pasted.items() if pair[0] == label != pair[1]]
        many = len(of_pair) / np.mean(others) if label == background and others else 1
        rows += of_pair[:: max(1, round(many))]
    if not rows:
        return ""
    names = sorted({label for label, _ in examples.pairs})
    chance = 1 / len(names)
    labels = torch.tensor([names.index(examples.pairs[row][0]) for row in rows])
    groups = [examples.groups[row] for row in rows]

    def known(features: Float[Tensor, "n d"]) -> Estimate:
        right = cross_validated(features[rows], labels, groups, seed) == labels
        return mean_over_groups(right.double().tolist(), groups, [seed, 5])[0]

    own, last = float(examples.right(examples.before)[examples.original].double().mean()), known(examples.features)
    middle = (chance + own) / 2
    # A wider interval says that there are too few pictures to tell: with more of them, such a network was mended
    if not last.high < middle or last.high - last.low > middle - chance:
        return ""
    said = (
        f"the last layer's inputs hardly know the objects: a linear layer on them recognises {last.value:.0%} of the "
        f"objects on backgrounds of all classes (95% interval {last.low:.0%} to {last.high:.0%}; chance is "
        f"{chance:.0%}), and the model recognises {own:.0%} of the unedited pictures"
    )
    if not stages:
        return said
    share, best = max((known(features).value, name) for name, features in stages.items())
    if not share > last.high:
        return f"{said}; no earlier stage knows clearly more"
    return (
        f"{said}; of the earlier stages, {best!r} knows most: a linear layer on its mean output recognises {share:.0%}"
    )


def _gap_of(result: CheckResult) -> float | None:
    gap = result.overall.gap
    return None if gap.mean is None else gap.value


def _worst_pair_of(result: CheckResult) -> Pair | None:
    right: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for row in result.images:
        for background, of_background in row.by_background.items():
            right[row.label, background] += of_background
    # Pictures that a pair of class and background needs, to count as the worst
    found = [Pair(*pair, float(np.mean(of_pair)), len(of_pair)) for pair, of_pair in right.items() if len(of_pair) >= 5]
    return min(found, key=lambda pair: pair.accuracy, default=None)


def _weights(pairs: Sequence[tuple[str, str]], kept: Bool[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the weights of pictures (n,), which sum to 1; the unedited ones have a fixed share together."""
    weights = torch.zeros(len(pairs), dtype=torch.float64)
    # The weight of the unedited pictures together. Weighed like the pasted ones, they have about 0.02 together, and two
    # networks lost up to 4 points more of their accuracy on them, and gained no more on other backgrounds.
    for chosen, share in ((kept, 0.25), (~kept, 0.75)):
        some = [pairs[row] for row in chosen.nonzero()[:, 0].tolist()]
        count = Counter(some)  # each class has the same weight, and in it each background
        backgrounds = Counter(label for label, _ in count)
        balanced = torch.tensor([1 / (count[pair] * backgrounds[pair[0]]) for pair in some], dtype=torch.float64)
        weights[chosen] = share * (balanced / balanced.sum())
    return weights / weights.sum()


def fit(
    examples: Examples,
    strength: float,
    start: tuple[Tensor, Tensor] | None = None,
    used: Bool[Tensor, " n"] | slice = slice(None),
) -> tuple[Tensor, Tensor]:
    """Train the rows of a layer anew by cross-entropy on the ``used`` examples; return their weights and biases.

    The loss is the weighted mean of -log p(own class), plus ``strength`` times the mean squared change of the logits
    that the change of each weight alone makes, summed over the weights of an output. The loss has one minimum;
    a ``start`` (weights and biases) that is near it saves steps.
    """
    old_weight, old_bias = examples.before
    weight, bias = start or examples.before
    features, own, rest = examples.features[used], examples.own[used], examples.fixed[used].logsumexp(1)
    weights = examples.weights[used] / examples.weights[used].sum()
    scale = features.square().mean(0).sqrt()
    change, shift = ((weight - old_weight) * scale).requires_grad_(), (bias - old_bias).requires_grad_()
    # In units of the features' own scale, the pull is the same for all weights, and L-BFGS needs fewer steps.
    scaled = features / scale.clamp_min(1e-12) * (scale > 0)
    before = features @ old_weight.T + old_bias
    optimiser = torch.optim.LBFGS([change, shift], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        logits = before + scaled @ change.T + shift
        of_class = logits.masked_fill(~own, -torch.inf).logsumexp(1)
        everything = torch.logaddexp(logits.logsumexp(1), rest)
        pull = strength * (change.square().sum() + shift.square().sum()) / len(change)
        value: Tensor = ((everything - of_class) * weights).sum() + pull
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(loss)
    new = old_weight + change.detach() / scale.clamp_min(1e-12) * (scale > 0)
    return new, old_bias + shift.detach()
