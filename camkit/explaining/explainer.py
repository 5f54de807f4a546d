"""The Explainer: one object that owns what is known about a model, and explains pictures with it.

picture -> images prepares it -> layers decides which layer -> engine runs the model -> methods weights -> heatmap -> an
Explanation. ``explain`` and ``explain_many`` are shells around an Explainer.
"""

from __future__ import annotations

import cmath
import copy
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast, overload

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from torch.export import ExportedProgram

from camkit.engine.guard import interruptible
from camkit.engine.passes import (
    Capture,
    autocasting,
    cores_of_a_pass,
    is_out_of_memory,
    keep_last,
    passes_at_once,
    quiet_pass,
    usable_precision,
)
from camkit.engine.streams import Task, in_order, using_cores
from camkit.errors import (
    CamkitError,
    ImageError,
    InputError,
    LayerError,
    MethodError,
    TargetError,
    advice,
    refuse_unknown_options,
    whole_number,
)
from camkit.explaining.explanation import (
    Choices,
    Explanation,
    Explanations,
    existing,
    explanations,
    sharing_scale,
    shown_pictures,
)
from camkit.images.prepare import (
    MOST_BYTES,
    Batch,
    Prepared,
    References,
    ReferencesError,
    batches_of,
    bytes_of_batch,
    in_rounds,
    leaves_room,
    located,
    prepare,
    source_of,
    stacked,
)
from camkit.images.regions import CropBoxes
from camkit.layers.memory import SHARED, ModelMemory
from camkit.layers.names import Layers, selectors_in
from camkit.layers.runner import OneByOneError, OneTargetError, Ran, Runner
from camkit.methods import AUTO, Method, find_method
from camkit.methods.on_one_picture import PictureScores
from camkit.methods.registry import MethodLike
from camkit.methods.runs import CHANGES, SignedMaps, signed_maps
from camkit.models import (
    as_model,
    black_box_in,
    changed_at,
    check_preprocess,
    detecting,
    device_of,
    dtype_of,
    load_model,
    pick_device,
    read_labels,
    usual_batch_size,
)
from camkit.models.loaded import Loadable, LoadedModel, as_labels
from camkit.models.modules import Adapted, adapted, explained_failures
from camkit.options import ExplainerOptions, Fusion, Model, Options, Targets
from camkit.targets import EachTarget, SimilarTarget, TargetLike, as_targets
from camkit.targets.classes import of_changed_picture
from camkit.targets.scores import Expands, OnPicture, Scores, Target
from camkit.types import Failure, ImageLike, Preprocess, TargetLayer

if TYPE_CHECKING:
    from camkit.options.settings import Settings

_Function = TypeVar("_Function", bound=Callable[..., Any])


def showing(options: type[Any]) -> Callable[[_Function], _Function]:
    """Let ``inspect.signature`` and ``help`` show the options of a function instead of its ``**options``."""
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind.__forward_arg__)
        for name, kind in options.__annotations__.items()
    ]

    def shown(function: _Function) -> _Function:
        signature = inspect.signature(function)
        others = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*others, *named])  # type: ignore[attr-defined]
        return function

    return shown


def _merged(
    function: Callable[..., Any], known: type, target_layer: Layers | None, options: Mapping[str, Any]
) -> tuple[Settings | None, Choices]:
    """Return the settings of a call's config, if it has one, and its choices.

    Raises:
        TypeError: the function has no such option.
        InputError: the config cannot be read, or a choice is wrong.
    """
    refuse_unknown_options(function, options, known.__annotations__)
    settings = None
    if options.get("config") is not None:
        from camkit.options.settings import as_settings  # noqa: PLC0415 - few calls have a config

        settings = as_settings(options["config"])
    return settings, Choices.of(target_layer, options, settings)


def configured_model(
    model: Loadable | None,
    section: Model,
    *,
    device: str | torch.device | None = None,
    trainable: bool = False,
) -> nn.Module | LoadedModel | ExportedProgram:
    """Return a model, loaded as the config says if it is given by name; None stands for the config's own model.

    The config's other settings apply to the model that it names, and to every model if it names none.

    Raises:
        InputError: neither the call nor the config names a model, or the model cannot be loaded.
    """
    if isinstance(model, (nn.Module, LoadedModel, ExportedProgram)):
        return model
    name = section.name if model is None else model
    if name is None:
        raise InputError(
            f"no model is named; {advice('pass one', 'pass --model')}, or set name in the config's [model] table"
        )
    section = section if section.describes(name) else Model()
    return load_model(name, device=device or section.device, trainable=trainable, **loading(section))


def loading(section: Model) -> dict[str, Any]:
    """Return the arguments of ``load_model`` that a table gives, without the name and the device."""
    given = {name: value for name, value in vars(section).items() if name not in ("name", "device")}
    return {**given, "labels": None if section.labels is None else read_labels(section.labels)}


def _loaded(
    model: Loadable | None,
    settings: Settings | None,
    options: Mapping[str, Any],
    kept: dict[tuple[Hashable, ...], LoadedModel],
) -> LoadedModel:
    """Return the model of a call as its options say; ``kept`` has the last ones that were loaded by name."""
    device, preprocess, labels = options.get("device"), options.get("preprocess"), options.get("labels")
    section, boxes = Model() if settings is None else settings.model, options.get("boxes")
    if model is None and settings is not None:
        model = section.name
    if isinstance(model, str):
        section = section if boxes is None else replace(section, boxes=boxes)
        where = str(device) if settings is not None else str(pick_device(device))
        key = (model, repr(section), where, *map(changed_at, (model, section.weights, section.labels)))
        named = kept.get(key) or as_model(configured_model(model, section, device=device))
        model = keep_last(kept, key, named, 2)  # few models are used in turn
    elif settings is not None:
        model = configured_model(model, section, device=device)
    memory = SHARED.get(model) if isinstance(model, nn.Module) and device is None else None
    if memory is not None and isinstance(model, nn.Module) and memory.record.is_current():
        check_preprocess(preprocess)  # the model itself was checked when its memory was made
        loaded = LoadedModel(model, type(model).__name__, preprocess, as_labels(labels))
    else:
        loaded = as_model(model, preprocess=preprocess, labels=labels, device=device)
    module = adapted(loaded.module, options.get("inputs"), options.get("picture"), options.get("output"))
    module = module if boxes is None or loaded.detects else detecting(module, boxes, loaded.labels)
    return replace(loaded, module=module, activation=options.get("activation") or loaded.activation)


def for_model(choices: Choices, module: nn.Module) -> Method:
    """Return the method; for a black box, "auto" is "occlusion", or "from-file" if the file returns its heat.

    Raises:
        LayerError: a layer was named, and the model is a black box.
        MethodError: the method needs layers or gradients, and the model is a black box.
    """
    method = choices.method
    box = black_box_in(module)
    if box is None:
        return method
    if choices.target_layer is not None:
        raise LayerError(box.lacks(advice("pass no target_layer", "leave out --layer")))
    if method == AUTO:
        return find_method(box.usual_method)
    if not method.for_black_boxes:
        instead = "use 'occlusion' or 'rise'"
        raise MethodError(f"method {method.name!r} cannot be used: {box.lacks(instead)}")
    return method


_MOST_TARGETS = 64
"""At most this many targets run in one pass, which keeps a gradient for each. One forward pass for every 64 backward
passes costs little."""


class BatchExplainer:
    """Explains batches of pictures of one size with one model, method and layer.

    Attributes:
        layers: those that the last batch was explained with; empty before the first one.
    """

    def __init__(self, loaded: LoadedModel, choices: Choices, memory: ModelMemory) -> None:
        self._loaded, self._choices, self._memory = loaded, choices, memory
        self._without_layer = replace(choices.but(progress=None), target_layer=None)
        self._smooth = choices.options["smooth"] or ""
        outer = (loaded.module, getattr(loaded.module, "model", None))
        self._has_inputs = any(isinstance(part, Adapted) and part.others for part in outer)
        selectors = None
        if choices.target_layer is not None:
            nothing = "the list of target layers is empty; pass None to let camkit choose the layer"
            selectors = selectors_in(choices.target_layer, nothing)
            memory.selected(selectors)  # refuses layers that the model does not have
        self.runner = Runner(memory, selectors, choices.method, choices.options)
        self.layers: tuple[TargetLayer, ...] = ()

    def __call__(
        self, batch: list[Prepared], targets: tuple[Target, ...], methods: tuple[Method, ...] = ()
    ) -> list[Explanation | Failure]:
        """Explain a batch of pictures of one size: in halves if memory runs out, one by one if the model needs it.

        Args:
            batch: the pictures.
            targets: what is explained of each.
            methods: those that share a pass; none stands for the Explainer's own.

        Returns:
            An explanation, or a failure, for each target of each picture: picture by picture, then method by method.
        """
        try:
            device, dtype = self._memory.refreshed().record.placement
            with autocasting(device):
                inputs = stacked([item.tensor for item in batch]).to(device, dtype)
                return self._of_targets(batch, inputs, targets, methods)
        except ReferencesError:
            raise
        except (OneByOneError, ImageError) as error:
            if isinstance(error, ImageError) and len(batch) == 1:
                # The frames of a traceback would keep the picture alive
                return [Failure(batch[0].source, error.with_traceback(None))]
            parts = [[item] for item in batch]
        except RuntimeError as error:
            if len(batch) == 1 or not is_out_of_memory(error):
                raise
            parts = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
        return [row for part in parts for row in self(part, targets, methods)]

    def _of_targets(
        self, batch: list[Prepared], inputs: Tensor, targets: tuple[Target, ...], methods: tuple[Method, ...]
    ) -> list[Explanation | Failure]:
        """Explain all targets, in one or more passes.

        Raises:
            ImageError: a picture does not fit: it has values that are not finite, the model cannot take it, or a target
                has no place on it.
            ModelError: the model cannot run, and the reason is known.
            Exception: as for ``Runner``.
        """
        _check_finite(inputs, batch[0])
        shown = shown_pictures(batch, inputs)
        scores: list[Scores] = []
        found: list[list[list[Explanation | Failure]]] = [[[] for _ in methods or (None,)] for _ in batch]
        parts = _parts(targets)
        while parts:
            part = parts.pop(0)
            try:
                with _saying_why(self._loaded.module, inputs):
                    ran = self.runner(_of_pictures(part, batch), inputs)
            except OneTargetError:
                parts = [*((target,) for target in part), *parts]
                continue
            self.layers = ran.layers
            for number, method in enumerate(methods or (ran.method,)):
                explained = self._explained(ran, part, batch, inputs, method, shown)
                for of_picture, rows in zip(found, explained, strict=True):
                    of_picture[number].extend(rows)
            scores += ran.captured.scores
            del ran  # frees the gradients before the next pass
        by_method = itertools.chain.from_iterable(found)
        return [row for rows in by_method for row in sharing_scale(existing(rows, scores))]

    def _explained(
        self,
        ran: Ran,
        targets: tuple[Target, ...],
        batch: list[Prepared],
        inputs: Tensor,
        method: Method,
        shown: Sequence[Image.Image | Tensor | None],
    ) -> list[list[Explanation | Failure]]:
        """Return a row for each target of each picture, for one method."""
        maps = signed_maps(ran.captured, method, ran.for_boxes, component="eigen" in self._smooth)
        if "augment" in self._smooth:
            maps = self._averaged(ran, targets, batch, inputs, method, maps)
        fuse = self._choices.options["fuse"] or method.fuse
        labels, choices = self._loaded.labels, self._without_layer
        each = targets * (len(maps) // len(targets))  # one may stand for several
        rows = explanations(maps, ran.captured, batch, shown, ran.layers, fuse, choices, each, labels)
        if not self._has_inputs:
            return rows
        return self._with_plain_scores(_with_scores(targets, batch, ran), inputs, rows)

    def _with_plain_scores(
        self, pairs: list[tuple[Target, Scores]], inputs: Tensor, rows: list[list[Explanation | Failure]]
    ) -> list[list[Explanation | Failure]]:
        """Add to each explanation the score that the other inputs give with a picture of one colour, its own mean."""
        plain = inputs.mean(tuple(range(2, inputs.dim())), keepdim=True).expand_as(inputs).contiguous()
        precision, record = self._choices.options["precision"], self._memory.refreshed().record
        with quiet_pass(self._loaded.module, inputs.device, precision, record), interruptible():
            output = self._loaded.module(plain)
            values = [
                [None] * len(inputs)
                if scored.boxes is not None
                else of_changed_picture(target, scored, mirrored=False)(output, len(inputs)).values.tolist()
                for target, scored in pairs
            ]
        return [
            [
                row if isinstance(row, Failure) else replace(row, without_picture=of_target[place])
                for row, of_target in zip(of_picture, values, strict=True)
            ]
            for place, of_picture in enumerate(rows)
        ]

    def _averaged(
        self,
        ran: Ran,
        targets: tuple[Target, ...],
        batch: list[Prepared],
        inputs: Tensor,
        method: Method,
        maps: list[SignedMaps],
    ) -> list[SignedMaps]:
        """Return the mean of the maps of the pictures and of their changed versions, for the same classes.

        Raises:
            TargetError: a target is a box.
            LayerError: the layer's cells lie elsewhere in a mirrored picture, or camkit chooses another layer for it.
        """
        layers, size, pairs = ran.layers, tuple(inputs.shape[2:]), _with_scores(targets, batch, ran)
        versions = [maps]
        for mirrored, factor in CHANGES:
            again = tuple(of_changed_picture(*each, mirrored=mirrored) for each in pairs)
            try:
                other = self.runner(_of_pictures(again, batch), (inputs.flip(-1) if mirrored else inputs) * factor)
            except OneTargetError:
                other = None
            if other is None or [layer.ref for layer in other.layers] != [layer.ref for layer in layers]:
                raise LayerError(
                    f"camkit chose layer {layers[0]} for the picture but another one for a changed version of it; "
                    "name the layer"
                )
            of_version = signed_maps(other.captured, method, component="eigen" in self._smooth)  # no boxes
            placements = [features.placement for features in other.captured.features]
            versions.append([signed.mirrored(placements, size) if mirrored else signed for signed in of_version])
        return [SignedMaps.averaged(of_target) for of_target in zip(*versions, strict=True)]


class Explainer:
    """Explains pictures with one model, and keeps what it finds out about the model.

    The layer is chosen once for each size of input. A change of the model's structure (another submodule, hook or
    switch, another type or device) is noticed, and the layer is chosen again. The model comes back from each call
    exactly as it went in. Several threads may use one Explainer.

    Args:
        model: a module, or a name as ``camkit.load_model`` takes it (``resnet50``, ``timm:NAME``, ``hf:NAME``,
            ``file.py:factory``, ``demo-fair``).
        target_layer: None lets camkit choose the layer; otherwise a name such as ``"layer4"`` (``"relu#2"``: its second
            call), a pattern, a type, a module, or a ``TargetLayer``. Several are fused.
        method: a name from ``camkit.METHODS``, or a function ``(activations, gradients) -> weights``. None is "auto":
            camkit chooses the method and the layer together. If attention runs between all tokens, the method is
            "chefer". Otherwise, if the deepest grid has fewer than 8 cells along an axis, it is "gradcam-sharpened":
            Grad-CAM there, times the share of the largest positive product of gradients and activations at a layer
            before it with a finer grid, if one carries the whole score. Otherwise it is "gradcam" at the deepest grid.
            At layers that you name, it is "gradcam" if their grid is the deepest one or has fewer than 8 cells along
            an axis, and else "gradcam-elementwise".
            The boxes of a detector take "layercam-centred" at the inputs of its head if each cell has boxes: positive
            gradients times activations less their channel's mean, summed over the grids. Other boxes take "odam":
            gradients times activations, summed over the inputs of the neck; without a neck or at layers that you name,
            "hirescam". Grad-CAM weights whole channels, which many boxes share.
        preprocess: turns a PIL picture into the model's input (C, H, W); a model loaded by name brings its own.
        labels: the names of the classes, in the order of their indices or as a dictionary from index to name.
        device: where a model loaded by name runs; a module stays where it is.
        precision: "fp32" (None), or "bf16" and "fp16" under autocast. On a CPU without units for bf16, bf16 takes
            several times as long. There, "bf16" warns and runs in fp32, and "bf16-forced" uses bf16 anyway.
        fuse: how several layers become one map: their "mean", "max", or "product" after scaling. None is the product
            for "refinecam", and else the mean.
        smooth: "augment" averages the maps of one class over the picture and its mirror image, each at 0.9, 1 and 1.1
            times its normalised values, in six passes; "eigen" keeps the first principal component of the weighted
            feature maps; "augment+eigen" does both. None leaves the maps as they are.
        spread: how a map's cells are spread over the picture: "measured" (None) draws each cell of a convolutional
            network where objects in artificial pictures change it, which takes 32 small pictures, once for each size of
            input; "even" draws them as other toolkits do.
        config: a ``camkit.toml``, or its tables as a mapping. Its table ``model`` names a model, and says how to load a
            model that is given by name. Its table ``explain`` gives the layer, method, precision, fusion, smoothing,
            references and batch size if they are None here.
        progress: called as ``progress(done, of)`` while a method runs the model on many pictures, such as Score-CAM.
        references: the pictures with which "expected" compares a picture: a folder, a list, or a batch (N, C, H, W). 8
            to 16 are enough; of more, 16 at equal distances are used. None is smooth noise that camkit makes.
        inputs: the model's other arguments by name, which are held fixed; tensors have a batch axis of 1. Each
            explanation says what the score is without the picture (``Explanation.without_picture``).
        picture: the name of the model's argument for the picture; None passes the picture as the first argument.
        output: which of several outputs holds the scores: its key, its attribute, or its index, from 0.
        boxes: the kind of detector whose raw outputs the model returns, as for ``camkit.load_model``.
        activation: what turns the scores into probabilities, as for ``camkit.load_model``.

    Raises:
        InputError: an argument is wrong; see ``camkit.errors`` for the kinds.

    Examples:
        >>> import camkit, torch
        >>> explainer = camkit.Explainer(camkit.load_model("demo-fair"))
        >>> explanation = explainer(torch.zeros(3, 128, 128), target=2)
        >>> explanation.heatmap.shape, explainer.layer.name, explainer.layer.layout.grid
        ((128, 128), 'features', (16, 16))
    """

    @showing(ExplainerOptions)
    def __init__(
        self,
        model: Loadable | None = None,
        target_layer: Layers | None = None,
        **options: Unpack[ExplainerOptions],
    ) -> None:
        settings, choices = _merged(Explainer, ExplainerOptions, target_layer, options)
        self._set_up(_loaded(model, settings, options, {}), choices, None, None)

    @classmethod
    def _of(
        cls,
        loaded: LoadedModel,
        choices: Choices,
        memory: ModelMemory | None = None,
        boxes: CropBoxes | None = None,
    ) -> Explainer:
        """Return an Explainer that shares what is known about the model and about preprocessings, if anything is."""
        explainer = cls.__new__(cls)
        explainer._set_up(loaded, choices, memory, boxes)
        return explainer

    def _set_up(
        self, loaded: LoadedModel, choices: Choices, memory: ModelMemory | None, boxes: CropBoxes | None
    ) -> None:
        memory = ModelMemory(loaded.module) if memory is None else memory
        self._loaded, self._memory, self._boxes = loaded, memory, boxes or CropBoxes()
        precision, note = usable_precision(choices.options["precision"], device_of(loaded.module))
        if note:
            warnings.warn(note, stacklevel=3)
        references = choices.options["references"]
        if not isinstance(references, References):  # else those of the Explainer that this one shares them with
            references = References(references, loaded.preprocess, memory.rank)
        choices = replace(choices, method=for_model(choices, loaded.module))
        self._choices = choices.but(precision=precision, references=references)
        self._explain_batch = BatchExplainer(loaded, self._choices, memory)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the model and the choices; what is known about the model holds for this one alone."""
        return Explainer._of, (self._loaded, self._choices)

    @property
    def model(self) -> nn.Module:
        """The model that is explained."""
        return self._loaded.module

    @property
    def name(self) -> str:
        """The name by which the model was loaded, or its class."""
        return self._loaded.name

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the classes; None if they are not known."""
        return self._loaded.labels

    @property
    def preprocess(self) -> Preprocess | None:
        """The function that turns a picture into the model's input; None if it is not known."""
        return self._loaded.preprocess

    @property
    def method(self) -> Method:
        """The method, as in ``camkit.METHODS``, or "auto"."""
        return self._choices.method

    @property
    def choices(self) -> Choices:
        """How it explains: the options, with those of the config and the usual ones."""
        return self._choices

    @property
    def layers(self) -> tuple[TargetLayer, ...]:
        """The layers that the last picture was explained with; several if they are fused, or one sharpens another.

        Raises:
            LayerError: no picture has been explained yet.
        """
        if not self._explain_batch.layers:
            raise LayerError(
                "the layer is not known until the first picture is explained, because it depends on the input's size"
            )
        return self._explain_batch.layers

    @property
    def layer(self) -> TargetLayer:
        """The layer that the last picture was explained with; the deepest one if a finer one sharpens its map.

        Raises:
            LayerError: no picture has been explained yet, or several layers are fused; then ``layers`` has them.
        """
        layers = self.layers
        if len(layers) > 1 and (self._choices.target_layer is not None or self._choices.method.stages):
            raise LayerError(
                f"{len(layers)} layers are fused: {' and '.join(map(str, layers))}; .layers has all of them"
            )
        return layers[-1]

    def __call__(self, img: ImageLike, target: TargetLike | None = None) -> Explanation:
        """Explain one target of one picture.

        Args:
            img: a path, a PIL picture, an array (H, W, 3) of uint8 or 0..1, or a normalised tensor (C, H, W) or
                (1, C, H, W).
            target: None for the picture's best class, a class index, a label, a function ``output -> (N,)``, or one of
                ``camkit.targets``.

        Raises:
            InputError: something in the call or the picture is wrong.
            Exception: whatever the model, ``preprocess`` or a target function raises.
        """
        return self._of_one_picture(img, target)[0]

    def by_methods(
        self, img: ImageLike, methods: Iterable[MethodLike], target: TargetLike | None = None
    ) -> list[Explanation]:
        """Explain one target of one picture with several methods, in one pass.

        Args:
            img, target: as for one method.
            methods: names or functions, each of which weights the same feature maps and gradients
                (``camkit.methods.Method.shares_pass``).

        Returns:
            An Explanation for each method, in their order.

        Raises:
            MethodError: a method needs a pass of its own, or the list of methods is empty.
            InputError: something else in the call or the picture is wrong.

        Examples:
            >>> import camkit
            >>> explainer = camkit.Explainer("demo-fair")
            >>> maps = explainer.by_methods(camkit.scenes.scene_paths()["plane-sky"], ["gradcam", "layercam"])
            >>> [explanation.method for explanation in maps]
            ['gradcam', 'layercam']
        """
        chosen = tuple(map(find_method, methods))
        if not chosen:
            raise MethodError("the list of methods is empty; pass at least one")
        for method in chosen:
            if not method.shares_pass:
                raise MethodError(
                    f"method {method.name!r} needs a pass of its own; use explainer.using({method.name!r})(img)"
                )
        # The pass of a method that reads gradients leaves all that the others need.
        run_for = next((method for method in chosen if method.reads_gradients), chosen[0])
        return self.using(run_for)._of_one_picture(img, target, chosen)

    def _of_one_picture(
        self, img: ImageLike, target: TargetLike | None, methods: tuple[Method, ...] = ()
    ) -> list[Explanation]:
        """Explain one target of one picture, with each of the methods."""
        targets, prepared = self._one(img, target)
        return [_explanation(row) for row in self._explain_batch([prepared], targets, methods)]

    def _one(self, img: ImageLike, target: TargetLike | None) -> tuple[tuple[Target, ...], Prepared]:
        """Return one target, and one picture that is ready for the model; a tensor may have a batch axis.

        Raises:
            TargetError: there are several targets.
            ImageError: there are several pictures.
        """
        if are_several_targets(target):
            raise TargetError("this call takes one target; explainer.batch([img], targets) explains several")
        if self._are_several_images(img):
            raise ImageError("this call takes one picture; explainer.batch(images) explains several")
        targets = self._targets(target)
        _check_count(targets, 1)
        image = img[0] if isinstance(img, Tensor) and img.dim() == self._memory.rank + 2 else img
        prepared = prepare(image, self._loaded.preprocess, source_of(image, 1), self._memory.rank)
        return targets, located(prepared, self._loaded.preprocess, self._boxes)

    def _settled(self, img: ImageLike) -> tuple[Float[Tensor, "n c *size"], Ran, Callable[[Tensor, Target], Capture]]:
        """Return a picture as input, its explanation, and a function that explains inputs alike and can be traced.

        The input holds the picture and its mirror image, or only the picture if the model takes one at a time. The
        errors are those of a call.
        """
        _, prepared = self._one(img, None)
        tensor = prepared.tensor.to(*self._memory.refreshed().record.placement)
        inputs, runner = torch.stack([tensor, tensor.flip(-1)]), self._explain_batch.runner
        try:
            return inputs, *runner.settled(inputs)
        except OneByOneError:
            return inputs[:1], *runner.settled(inputs[:1])

    def using(
        self,
        method: MethodLike | None = None,
        target_layer: Layers | None = None,
        *,
        fuse: Fusion | None = None,
        model: nn.Module | None = None,
    ) -> Explainer:
        """Return an Explainer with another method or layer that shares what this one has found out about the model.

        Args:
            method, target_layer, fuse: as for ``Explainer``; None keeps this Explainer's own.
            model: another module with the same layers, such as a copy with other weights; None keeps the model.

        Raises:
            InputError: an argument is wrong.

        Examples:
            >>> import camkit
            >>> explainer = camkit.Explainer(camkit.load_model("demo-fair"))
            >>> explainer.using("layercam")(camkit.scenes.scene_paths()["plane-sky"]).method
            'layercam'
        """
        own = self._choices
        chosen = own.method if method is None else find_method(method)
        layers = own.target_layer if target_layer is None and chosen.layer else target_layer
        fused = own.but(fuse=fuse or own.options["fuse"])
        return self.choosing(replace(fused, method=chosen, target_layer=layers).checked(), model)

    def choosing(self, choices: Choices, model: nn.Module | None = None) -> Explainer:
        """Return an Explainer that explains in another way, and shares what this one has found out about the model.

        Args:
            choices: how it explains, all of it.
            model: as for ``using``.

        Raises:
            InputError: the model does not have the layer, or cannot be explained by the method.
        """
        if model is None or model is self.model:
            return Explainer._of(self._loaded, choices, self._memory, self._boxes)
        return Explainer._of(replace(self._loaded, module=model), choices, None, self._boxes)

    def scores_of(
        self, img: ImageLike, target: TargetLike | None = None, *, batch_size: int | None = None
    ) -> PictureScores:
        """Return the model as a function from changed versions of a picture to their scores, as metrics need it.

        Args:
            img, target: as for one picture; the target is fixed by this picture.
            batch_size: pictures per pass; halved if memory runs out. None means 32 on a GPU and 4 on a CPU.

        Returns:
            A function that takes (M, C, H, W), changed versions of its ``picture`` (C, H, W), and returns (M,): the
            probability of the target's class, or the target's score if it has no probability.

        Raises:
            InputError: something in the call or the picture is wrong.
        """
        at_once, memory = self._batch_size(batch_size), self._memory.refreshed()
        targets, prepared = self._one(img, target)
        picture = prepared.tensor.detach().to(*memory.record.placement)
        _check_finite(picture[None], prepared)

        (fixed,) = _of_pictures(targets, [prepared])
        at_once = at_once if memory.keeps_pictures_apart(picture[None], at_once) else 1
        with _saying_why(self.model, picture[None]):
            activation, precision = self._loaded.activation, self._choices.options["precision"]
            return PictureScores(
                self.model, picture, fixed, activation, precision, at_once, lambda: self._memory.refreshed().record
            )

    def _are_several_images(self, img: object) -> bool:
        if isinstance(img, Tensor):
            return img.dim() == self._memory.rank + 2 and len(img) != 1
        return isinstance(img, (list, tuple))

    def batch(
        self, images: Iterable[ImageLike], target: Targets = None, *, batch_size: int | None = None
    ) -> Explanations:
        """Explain several pictures.

        Args:
            images: what ``explainer(img)`` takes, and batches (N, C, H, W).
            target: as for one picture, or a list of targets, each of which is explained for every picture; up to
                64 together cost one forward pass.
            batch_size: pictures per pass; halved if memory runs out. None means 32 on a GPU and 4 on a CPU.

        Returns:
            The Explanations, picture by picture, target by target within: a list that can also be drawn and saved as
            one sheet.

        Raises:
            InputError: something in the call or a picture is wrong.
        """
        return Explanations(self.stream(images, target, batch_size=batch_size))

    @overload
    def stream(
        self,
        images: Iterable[ImageLike],
        target: Targets = None,
        *,
        batch_size: int | None = None,
        on_error: Literal["raise"] = "raise",
        draft: bool = False,
    ) -> Iterator[Explanation]: ...

    @overload
    def stream(
        self,
        images: Iterable[ImageLike],
        target: Targets = None,
        *,
        batch_size: int | None = None,
        on_error: Literal["raise", "yield"],
        draft: bool = False,
    ) -> Iterator[Explanation | Failure]: ...

    def stream(
        self,
        images: Iterable[ImageLike],
        target: Targets = None,
        *,
        batch_size: int | None = None,
        on_error: Literal["raise", "yield"] = "raise",
        draft: bool = False,
    ) -> Iterator[Explanation | Failure]:
        """Explain any number of pictures: memory holds a few batches, and reading overlaps with computing.

        Args:
            images: any iterable of what ``batch`` takes; it is read only as fast as the results are taken.
            target, batch_size: as for ``batch``.
            on_error: for a picture that cannot be read: "raise" its error in its place, or "yield" a ``Failure``
                there and go on.
            draft: as for ``explain_many``.

        Returns:
            An iterator over the Explanations, in the order of the pictures. The arguments are checked before it is
            returned; the pictures are read as it advances.

        Raises:
            InputError: something in the call is wrong.
        """
        return self._stream(images, target, batch_size, on_error, draft=draft)

    def _stream(
        self,
        images: Iterable[ImageLike],
        target: Targets,
        batch_size: int | None,
        on_error: str,
        *,
        draft: bool,
        on_pass: Callable[[], None] | None = None,
    ) -> Iterator[Explanation | Failure]:
        """Explain any number of pictures; ``on_pass`` is called before the rows of each pass through the model."""
        if on_error not in ("raise", "yield"):
            raise InputError(f"on_error must be 'raise' or 'yield', not {on_error!r}")
        targets, size = self._targets(target), self._batch_size(batch_size)
        batches = self._batches(images, targets, size, draft=draft)
        return _rows_of(self._passes(targets, batches, counted=on_pass is not None), batches, on_error, on_pass)

    def _batch_size(self, batch_size: int | None) -> int:
        given = self._choices.options["batch_size"] if batch_size is None else batch_size
        return whole_number(usual_batch_size(device_of(self.model)) if given is None else given, "batch_size", 1)

    def _targets(self, target: Targets) -> tuple[Target, ...]:
        targets = as_targets(target, self._loaded.labels, self._loaded.activation)
        return tuple(self._completed(each) if isinstance(each, SimilarTarget) else each for each in targets)

    def _completed(self, target: SimilarTarget) -> SimilarTarget:
        """Return a target whose reference picture has been run through the model."""
        if target.embedding is not None:
            return target
        module, device = self.model, device_of(self.model)
        prepared = prepare(target.reference, self._loaded.preprocess, "the reference picture", self._memory.rank)
        with quiet_pass(module, device, "fp32", self._memory.refreshed().record), interruptible():
            return target.embedded(module(prepared.tensor[None].to(device, dtype_of(module))))

    def _passes(
        self, targets: tuple[Target, ...], batches: Iterator[Batch], *, counted: bool
    ) -> Generator[list[Explanation | Failure], None, None]:
        """Explain batches in order. The first one settles the layer; those after it may run several at once.

        A method or target of the user runs in this thread only. The last digits depend on the number of cores of a
        pass. If the caller counts the passes, to continue at one of them later, all passes get the same number of
        cores. Otherwise the first pass gets all cores, and so do the last ones if they could not keep all cores busy
        together.
        """
        for_threads = self.method.for_threads and all(target.for_threads for target in targets)
        at_once = passes_at_once(self._memory.refreshed().record) if for_threads else 1
        cores = cores_of_a_pass() if at_once > 1 else torch.get_num_threads()
        for batch in batches:
            with using_cores(cores) if counted and leaves_room(batch) else nullcontext():
                rows = self._rows(batch, targets)
            yield rows
            if at_once > 1:
                break
        else:
            return

        def task(batch: Batch, together: bool) -> Task[list[Explanation | Failure]]:
            rows = functools.partial(self._rows, batch, targets)
            return Task(rows, in_thread=together and leaves_room(batch), size=bytes_of_batch(batch))

        together = zip(batches, itertools.repeat(True)) if counted else in_rounds(batches, at_once)
        tasks = itertools.starmap(task, together)
        yield from in_order(tasks, workers=at_once, ahead=at_once, prompt=True, most=MOST_BYTES, cores=cores)

    def _batches(
        self, images: Iterable[ImageLike], targets: tuple[Target, ...], batch_size: int, *, draft: bool
    ) -> Generator[Batch, None, None]:
        """Read the pictures, and join them into batches of one size."""
        pictures = 0
        preprocess, boxes = self._loaded.preprocess, self._boxes
        for batch in batches_of(images, preprocess, self._memory.rank, boxes, batch_size, draft=draft):
            pictures += len(batch) if isinstance(batch, list) else 1
            yield batch
            del batch
        _check_count(targets, pictures)

    def _rows(self, batch: Batch, targets: tuple[Target, ...]) -> list[Explanation | Failure]:
        """Explain a batch, and empty its list, so that only the rows hold the pictures, each until it is consumed."""
        if isinstance(batch, Failure):
            return [batch]
        rows = self._explain_batch(batch, targets)
        batch.clear()
        return rows

    def forget(self) -> None:
        """Forget what is known about the model, also by ``explain`` and by the Explainers that share it.

        camkit notices by itself when the model's modules, hooks, buffers or attributes change. Call this after a change
        of something else that switches what the model computes, such as a global variable or a helper object.

        Examples:
            >>> import camkit
            >>> explainer = camkit.Explainer("demo-fair")
            >>> explainer.forget()
        """
        self._memory.start_over()
        shared = SHARED.get(self.model)
        if shared is not None:
            shared.start_over()


def are_several_targets(target: object) -> bool:
    """Tell whether a target is a list, or one that stands for several."""
    return isinstance(target, (list, tuple)) or (isinstance(target, Expands) and not isinstance(target, Tensor))


def _parts(targets: tuple[Target, ...]) -> list[tuple[Target, ...]]:
    """Split targets into parts, each with few enough for one pass.

    A target that stands for several has a part of its own, so that its scores can be told from others.
    """
    parts: list[tuple[Target, ...]] = []
    for expands, together in itertools.groupby(targets, key=lambda target: isinstance(target, Expands)):
        items, most = tuple(together), 1 if expands else _MOST_TARGETS
        parts += [items[start : start + most] for start in range(0, len(items), most)]
    return parts


def _check_count(targets: tuple[Target, ...], pictures: int) -> None:
    """Refuse targets that name classes for more pictures than the call has."""
    for target in targets:
        if isinstance(target, EachTarget):
            target.check_count(pictures)


def _of_pictures(targets: Sequence[Target], batch: Sequence[Prepared]) -> tuple[Target, ...]:
    """Return the targets for the pictures of a batch; some targets differ between pictures."""
    numbers, to_inputs = [item.number for item in batch], [item.to_input for item in batch]
    size = tuple(batch[0].tensor.shape[1:])
    chosen = [target.of_pictures(numbers) for target in targets]
    return tuple(target.on_inputs(to_inputs, size) if isinstance(target, OnPicture) else target for target in chosen)


def _with_scores(targets: tuple[Target, ...], batch: Sequence[Prepared], ran: Ran) -> list[tuple[Target, Scores]]:
    """Return the scores of a pass, each with its target; a target that stands for several is alone in its pass."""
    of_pictures, scores = _of_pictures(targets, batch), ran.captured.scores
    return list(zip(of_pictures * len(scores) if len(targets) == 1 else of_pictures, scores, strict=True))


def _check_finite(inputs: Tensor, first: Prepared) -> None:
    """Refuse a batch with values that are not finite; the sum of all shows at once whether all are."""
    values = inputs.detach()
    if not (cmath.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())):
        raise ImageError(f"{first.source} holds NaN or infinite values where the model would see it")


@contextmanager
def _saying_why(module: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Say why a pass in the block failed, as a sentence about the picture or the model, if the reason is known.

    Raises:
        ImageError: the model cannot take such pictures.
        ModelError: the model cannot run.
    """
    try:
        yield
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error) or isinstance(error, CamkitError):
            raise
        with explained_failures(module, inputs):
            raise


def _rows_of(
    passes: Generator[list[Explanation | Failure], None, None],
    batches: Generator[Batch, None, None],
    on_error: str,
    on_pass: Callable[[], None] | None,
) -> Iterator[Explanation | Failure]:
    """Yield the rows of passes, each of which is then held by the caller alone.

    Both generators end with the rows, also after an error: its traceback would keep them until Python's collector finds
    them, which may be in the middle of the start of a thread, where waiting for the threads that read never ends.
    """
    with closing(batches), closing(passes):
        for rows in passes:
            if on_pass is not None:
                on_pass()
            rows.reverse()
            while rows:
                row = rows.pop()
                yield _explanation(row) if on_error == "raise" else row
                del row


def _explanation(row: Explanation | Failure) -> Explanation:
    """Return an explanation; raise the error of a failure."""
    if isinstance(row, Failure):
        # A copy: an error whose traceback holds frames that hold the error would keep the pictures alive.
        raise copy.copy(row.error) from row.error.__cause__
    return row


_kept_models: dict[tuple[Hashable, ...], LoadedModel] = {}
_kept_boxes = CropBoxes()
"""What ``explain`` keeps between calls, besides a memory for each living model."""


def _sharing_explainer(
    function: Callable[..., Any], model: Loadable | None, target_layer: Layers | None, options: Options
) -> Explainer:
    """Return an Explainer that shares what earlier calls of ``explain`` found out about the model."""
    settings, choices = _merged(function, Options, target_layer, options)
    loaded = _loaded(model, settings, options, _kept_models)
    memory = SHARED.get(loaded.module)
    if memory is None:
        memory = SHARED.setdefault(loaded.module, ModelMemory(loaded.module))
    return Explainer._of(loaded, choices, memory, _kept_boxes)


@showing(Options)
def explain(
    model: Loadable | None,
    img: ImageLike | Sequence[ImageLike],
    target_layer: Layers | None = None,
    **options: Unpack[Options],
) -> Explanation | Explanations:
    """Show which pixels a model used.

    camkit keeps what it finds out about the model while the model lives, so that later calls are quick. An
    ``Explainer`` does the same, in an object that you hold.

    Args:
        model: a module, or a name as ``camkit.load_model`` takes it (``resnet50``, ``timm:NAME``, ``hf:NAME``,
            ``file.py:factory``, ``demo-fair``); None is the config's model. The module comes back exactly as it went
            in.
        img: a path, a PIL picture, an array (H, W, 3) of uint8 or 0..1, a normalised tensor (C, H, W) or (N, C, H, W),
            or a list of these. A model of 1-D or 3-D convolutions takes tensors (C, L) or (C, D, H, W).
        target_layer: None (camkit chooses it), a name, a pattern, a type, a module or a TargetLayer; several are fused.
        **options: ``method``, ``preprocess``, ``labels``, ``device``, ``precision``, ``fuse``, ``smooth``, ``spread``,
            ``config``, ``progress``, ``references``, ``inputs``, ``picture``, ``output`` and ``activation`` as for
            ``Explainer``;
            ``target`` and ``batch_size`` as for ``Explainer.batch``: ``target`` is None for each picture's best class,
            a class index, a label's text, a function ``output -> (N,)``, one of ``camkit.targets``, or a list of these.

    Returns:
        One Explanation for one picture and one target; otherwise a list, ``Explanations``, picture by picture, target
        by target within.
        A target that stands for several, such as ``camkit.targets.above``, gives a list too.

    Raises:
        InputError: something in the call or a picture is wrong; see ``camkit.errors`` for the kinds.
        Exception: whatever the model, ``preprocess`` or a target function raises.

    Examples:
        >>> import camkit, torch
        >>> model = camkit.load_model("demo-fair").module
        >>> camkit.explain(model, torch.zeros(3, 128, 128), target=2).heatmap.shape
        (128, 128)
    """
    images: Sequence[ImageLike] = img if isinstance(img, (list, tuple)) else [cast("ImageLike", img)]
    target = options.get("target")
    explainer = _sharing_explainer(explain, model, target_layer, options)
    explained = explainer.batch(images, target)
    several = are_several_targets(target) or explainer._are_several_images(img)
    return explained if several else explained[0]


@overload
def explain_many(
    model: Loadable | None,
    images: Iterable[ImageLike],
    target_layer: Layers | None = None,
    *,
    on_error: Literal["raise"] = "raise",
    draft: bool = False,
    on_pass: Callable[[], None] | None = None,
    **options: Unpack[Options],
) -> Iterator[Explanation]: ...


@overload
def explain_many(
    model: Loadable | None,
    images: Iterable[ImageLike],
    target_layer: Layers | None = None,
    *,
    on_error: Literal["yield"],
    draft: bool = False,
    on_pass: Callable[[], None] | None = None,
    **options: Unpack[Options],
) -> Iterator[Explanation | Failure]: ...


@showing(Options)
def explain_many(
    model: Loadable | None,
    images: Iterable[ImageLike],
    target_layer: Layers | None = None,
    *,
    on_error: Literal["raise", "yield"] = "raise",
    draft: bool = False,
    on_pass: Callable[[], None] | None = None,
    **options: Unpack[Options],
) -> Iterator[Explanation | Failure]:
    """Explain any number of pictures as a stream: memory holds a few batches, and reading overlaps with computing.

    Args:
        model, target_layer, **options: as for ``explain``.
        images: any iterable of what ``explain`` takes; it is read only as fast as the results are taken.
        on_error: for a picture that cannot be read: "raise" its error in its place, or "yield" a ``Failure`` there and
            go on.
        draft: read large JPEG files at a half, a quarter or an eighth of their size, at least twice what the model's
            preprocessing keeps. This is faster and changes the maps a little; see the guide on large folders.
        on_pass: called before the rows of each pass through the model, and before the row of a picture that cannot be
            read. A caller that starts again where a pass began gets the same passes, and so the same digits.

    Returns:
        An iterator over the Explanations, in the order of the pictures. The arguments are checked before it is
        returned; the pictures are read as it advances.

    Raises:
        InputError: as ``explain``.
    """
    explainer = _sharing_explainer(explain_many, model, target_layer, options)
    return explainer._stream(images, options.get("target"), None, on_error, draft=draft, on_pass=on_pass)
