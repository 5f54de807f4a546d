"""``explain`` and ``explain_many``: shells around an Explainer, which share what earlier calls found out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from torch import nn

from camkit.errors import refuse_unknown_options
from camkit.explaining.choices import Choices, config_settings, configured_model, showing, with_inputs
from camkit.explaining.explainer import Explainer, are_several_targets
from camkit.explaining.explanation import Explanation, Explanations
from camkit.images.crop import CropBoxes
from camkit.layers.memory import SHARED, ModelMemory
from camkit.layers.names import Layers
from camkit.models import as_model, changed_at, check_preprocess, pick_device
from camkit.models.loaded import Loadable, LoadedModel, as_labels
from camkit.options import Options
from camkit.types import Failure, ImageLike

if TYPE_CHECKING:
    from camkit.options.settings import Settings


class _Shell:
    """What ``explain`` keeps between calls, besides a memory for each living model: the last models loaded by name."""

    _MOST_LOADED = 2

    def __init__(self) -> None:
        self._loaded: dict[tuple[Hashable, ...], LoadedModel] = {}
        self._boxes = CropBoxes()

    def explainer(
        self,
        function: Callable[..., Any],
        model: Loadable | None,
        target_layer: Layers | None,
        options: Options,
    ) -> Explainer:
        """Return an Explainer that shares what earlier calls found out about the model."""
        refuse_unknown_options(function, options, Options.__annotations__)
        config = options.get("config")
        settings = None if config is None else config_settings(config)
        choices = Choices.of(target_layer, options, settings)
        loaded = self._load(model, settings, options)
        if {"inputs", "picture", "output", "activation"} & options.keys():
            loaded = with_inputs(loaded, options)
        memory = SHARED.get(loaded.module)
        if memory is None:
            memory = SHARED.setdefault(loaded.module, ModelMemory(loaded.module))
        return Explainer._sharing(memory, self._boxes, loaded, choices)

    def _load(self, model: Loadable | None, settings: Settings | None, options: Options) -> LoadedModel:
        """Return the model of a call; the last ones that were loaded by name are kept."""
        device, preprocess, labels = options.get("device"), options.get("preprocess"), options.get("labels")
        if model is None and settings is not None:
            model = settings.model.name
        if isinstance(model, str):
            name, section = model, "" if settings is None else repr(settings.model)
            where = str(pick_device(device)) if settings is None else str(device)
            files = (name,) if settings is None else (name, settings.model.weights, settings.model.labels)
            key = (name, section, where, tuple(map(changed_at, files)))
            if key not in self._loaded:
                named = name if settings is None else configured_model(name, settings.model, device=device)
                self._loaded[key] = as_model(named, device=device if settings is None else None)
                while len(self._loaded) > self._MOST_LOADED:
                    del self._loaded[next(iter(self._loaded))]
            model = self._loaded[key]
        elif settings is not None:
            model = configured_model(model, settings.model, device=device)
        memory = SHARED.get(model) if isinstance(model, nn.Module) and device is None else None
        if memory is not None and isinstance(model, nn.Module) and memory.record.is_current():
            check_preprocess(preprocess)  # the model itself was checked when its memory was made
            return LoadedModel(model, type(model).__name__, preprocess, as_labels(labels))
        return as_model(model, preprocess=preprocess, labels=labels, device=device)


_SHELL = _Shell()


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
    explainer = _SHELL.explainer(explain, model, target_layer, options)
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
    explainer = _SHELL.explainer(explain_many, model, target_layer, options)
    return explainer._checked_stream(images, options.get("target"), None, on_error, draft=draft, on_pass=on_pass)
