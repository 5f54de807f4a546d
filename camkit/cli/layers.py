"""``camkit layers``: a model's layers, for a drawn scene as its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camkit.cli.options import Common, Source
from camkit.cli.terminal import TALK, printer
from camkit.errors import ModelError

if TYPE_CHECKING:
    import torch

    from camkit.layers.decision import Decision
    from camkit.models.loaded import LoadedModel


def layers(*, source: Source, common: Common = Common()) -> int:
    """List a model's layers in execution order, what each costs, and which one camkit would explain and why.

    torchinfo counts the parameters, the multiply-adds for one picture, and the memory of each output. The layers are
    the same with any weights, so camkit loads none unless you name some. With --verbose, the table has more columns;
    with --quiet, camkit prints only the name of the layer that it would explain.
    """
    common.begin()
    from camkit.cli import text
    from camkit.layers.costs import costs

    loaded = source.load(pretrained=source.weights is not None)
    decision = _decide_on(loaded)
    if TALK.quiet:
        printer().print(text.layer_name(decision))
        return 0
    counted = costs(loaded.module, _example(loaded))
    table = text.layers(decision, counted, complete=TALK.verbose)
    console = printer()
    (text.wide(table, console) if TALK.verbose else text.narrow(console)).print(table)
    console.print(text.total(counted))
    console.print(text.choice(decision))
    return 0


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
    from camkit.demo.scenes import scene_paths
    from camkit.images.read import open_picture
    from camkit.models import device_of

    if model.preprocess is None:
        raise ModelError(
            f"camkit does not know how to prepare pictures for {model.name}; pass --size, --mean and --std, or let the "
            "factory return the module and the function that prepares a PIL picture for it"
        )
    picture = open_picture(next(iter(scene_paths().values())))
    return model.preprocess(picture)[None].to(device_of(model.module))
