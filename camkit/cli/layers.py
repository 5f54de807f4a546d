"""``camkit layers``: a model's layers, for a drawn scene as its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camkit.cli.options import Common, Source, command
from camkit.cli.terminal import TALK, printer
from camkit.errors import CamkitError, LayerError, ModelError, printable

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from camkit.layers.decision import Decision
    from camkit.models.loaded import LoadedModel
    from camkit.types import TargetLayer


@command
def layers(*, source: Source, common: Common = Common()) -> int:
    """List a model's layers in execution order, what each costs, and which ones camkit would explain and why.

    torchinfo counts the parameters, the multiply-adds for one picture, and the memory of each output. The layers are
    the same with any weights, so camkit loads none unless you name some. With --verbose, the table has more columns;
    with --quiet, camkit prints only the names of the layers that it would explain.
    """
    common.begin()
    from camkit.cli import text
    from camkit.layers.costs import costs

    loaded = source.load(pretrained=source.weights is not None)
    decision = _decide_on(loaded)
    used = _used(loaded, decision)
    if TALK.quiet:
        printer().print(printable("+".join(map(str, used or (decision.chosen(),)))))
        return 0
    counted = costs(loaded.module, _example(loaded))
    table = text.layers(decision, used, counted, complete=TALK.verbose)
    console = printer()
    (text.wide(table, console) if TALK.verbose else text.narrow(console)).print(table)
    console.print(text.total(counted))
    try:
        console.print(text.choice(decision, used or (decision.chosen(),)))
    except LayerError as error:
        console.print(printable(str(error)), style="yellow", markup=False)
    return 0


def _used(model: LoadedModel, decision: Decision) -> tuple[TargetLayer, ...]:
    """Return the layers that ``explain`` uses for the scene; if it fails, those of the decision."""
    from camkit.explainer import Explainer

    explainer = Explainer(model)
    try:
        explainer(_scene())
    except CamkitError:
        return decision.levels or (() if decision.layer is None else (decision.layer,))
    return explainer.layers


def _decide_on(model: LoadedModel) -> Decision:
    """Choose the layer of a model that was loaded by name, with a drawn scene that its own preprocessing prepares."""
    from camkit.layers.choose import decide
    from camkit.models import about_channels

    inputs = _example(model)
    try:
        return decide(model.module, inputs, every=True)
    except RuntimeError as error:
        sentence = about_channels(model.module, inputs)
        if sentence is None:
            raise
        raise ModelError(sentence) from error


def _example(model: LoadedModel) -> torch.Tensor:
    from camkit.models import device_of

    if model.preprocess is None:
        raise ModelError(
            f"camkit does not know how to prepare pictures for {model.name}; pass --size, --mean and --std, or let the "
            "factory return the module and the function that prepares a PIL picture for it"
        )
    return model.preprocess(_scene())[None].to(device_of(model.module))


def _scene() -> Image.Image:
    from camkit.demo.scenes import scene_paths
    from camkit.images.read import open_picture

    return open_picture(next(iter(scene_paths().values())))
