"""Where models come from: torchvision by name, the two demo networks, or the caller's own module."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from camkit.errors import InputError, ModelError, did_you_mean
from camkit.scenes.network import LABELS as SCENE_LABELS
from camkit.scenes.network import SceneNet, load_scene_net
from camkit.scenes.network import preprocess as scene_preprocess
from camkit.values import LoadedModel, Preprocess

DEMO_MODELS = ("demo-biased", "demo-fair")

Labels: TypeAlias = "Sequence[str] | Mapping[int, str]"

_STATE_KEYS = ("state_dict", "model_state_dict", "model", "model_ema")
_PREFIXES = ("module.", "_orig_mod.")
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def model_names() -> list[str]:
    """List the names a model can be asked for by: torchvision's classifiers and the demo networks."""
    return [*torchvision.models.list_models(module=torchvision.models), *DEMO_MODELS]


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the device asked for, or the best one there is: CUDA, MPS, CPU.

    Raises:
        ModelError: there is no such device on this machine.
    """
    if device is None:
        return torch.device(
            "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        )
    try:
        picked = torch.device(device)
        torch.empty(0, device=picked)
    except (RuntimeError, AssertionError, TypeError) as error:
        here = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        here += ["mps"] if torch.backends.mps.is_available() else []
        raise ModelError(f"device {str(device)!r} cannot be used here; there is {', '.join(here)}") from error
    return picked


def load_model(name: str, weights: str | Path | None = None, device: str | torch.device | None = None) -> LoadedModel:
    """Build a model by name, with weights, preprocessing and labels.

    Args:
        name: a torchvision classifier, ``demo-biased`` or ``demo-fair``.
        weights: a state dict (``.pth``, ``.pt`` or ``.safetensors``), or the name of one of torchvision's weights, for
            example ``IMAGENET1K_V1``; None loads torchvision's default weights, downloading them once.
        device: where to put the model; the best there is when None.

    Raises:
        ModelError: no such model, weights that cannot be had or do not fit, or no such device.
    """
    with torch.inference_mode(mode=False):
        return _load(name, weights, pick_device(device))


def _load(name: str, weights: str | Path | None, place: torch.device) -> LoadedModel:
    if name in DEMO_MODELS:
        loaded = _demo_model(name, weights)
    elif name in torchvision.models.list_models(module=torchvision.models):
        loaded = _torchvision_model(name, weights)
    else:
        hint = did_you_mean(name, model_names()) or "; choose a torchvision classifier, demo-biased or demo-fair"
        raise ModelError(f"unknown model {name!r}{hint}")
    loaded.module.eval().requires_grad_(requires_grad=False).to(place)
    return loaded


def _demo_model(name: str, weights: str | Path | None) -> LoadedModel:
    if weights is None:
        return LoadedModel(load_scene_net(name), name, scene_preprocess, tuple(SCENE_LABELS))
    module = SceneNet()
    _fill(module, read_state_dict(Path(weights)), name, Path(weights))
    return LoadedModel(module, name, scene_preprocess, tuple(SCENE_LABELS))


def _torchvision_model(name: str, weights: str | Path | None) -> LoadedModel:
    known = torchvision.models.get_model_weights(name)
    if weights is None:
        return _published(name, known.DEFAULT)
    if str(weights) in known.__members__:
        return _published(name, known[str(weights)])
    path = Path(weights)
    if not path.is_file():
        raise ModelError(
            f"there is no weights file {path}{did_you_mean(str(weights), known.__members__)}; "
            f"{name} has the published weights {', '.join(known.__members__)}"
        )
    state = read_state_dict(path)
    classes = _class_count(name, state)
    module = _build(name, classes, state)
    _fill(module, state, name, path)
    # A file published by torchvision is known by its name; any other is taken for one trained with the first recipe.
    recipe = next((entry for entry in known if Path(entry.url).name == path.name), next(iter(known)))
    labels = tuple(recipe.meta["categories"])
    return LoadedModel(
        module,
        name,
        recipe.transforms(),
        labels if classes is None or classes == len(labels) else None,
        f"pictures prepared as for torchvision's {recipe}",
    )


def _build(name: str, classes: int | None, state: dict[str, Tensor]) -> nn.Module:
    """Build a torchvision model that a state dict could fit: so many classes, auxiliary heads if it has any."""
    options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        # Their published weights scale the input in the model; their slow initialisation would be overwritten.
        auxiliary = any(key.lower().startswith("aux") for key in state)
        options |= {"init_weights": False, "transform_input": True, "aux_logits": auxiliary}
    return cast("nn.Module", torchvision.models.get_model(name, weights=None, **options))


def _published(name: str, weights: Any) -> LoadedModel:
    try:
        module = torchvision.models.get_model(name, weights=weights)
    except OSError as error:
        raise ModelError(
            f"the weights of {name} cannot be downloaded ({_first_line(error)}); with a local file pass --weights FILE "
            "(weights=...), and with nothing at all try: camkit demo"
        ) from error
    except Exception as error:
        file = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
        raise ModelError(
            f"the weights in {file} are damaged or another model's ({_first_line(error)}); delete the file, try again"
        ) from error
    return LoadedModel(module, name, weights.transforms(), tuple(weights.meta["categories"]))


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:120] if lines else type(error).__name__


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read a state dict without running any code from the file (``weights_only=True``, or safetensors).

    Checkpoints that hold the state dict under a key, and the prefixes ``module.`` and ``_orig_mod.``, are understood.

    Raises:
        ModelError: the file is missing, is no state dict, or would have to run code.
    """
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ModelError(f"there is no weights file {path}") from error
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path} is not a plain state dict: it holds Python objects or is damaged; "
            "save it with torch.save(model.state_dict(), ...)"
        ) from error
    except Exception as error:
        raise ModelError(f"{path} cannot be read as weights ({type(error).__name__}: {_first_line(error)})") from error
    state = _innermost(state)
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ModelError(f"{path} is not a state dict; save it with torch.save(model.state_dict(), ...)")
    while prefix := next((known for known in _PREFIXES if all(key.startswith(known) for key in state)), None):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _innermost(checkpoint: Any) -> Any:
    """Return the state dict inside a checkpoint's dictionaries."""
    while isinstance(checkpoint, dict):
        inner = next((checkpoint[key] for key in _STATE_KEYS if isinstance(checkpoint.get(key), dict)), None)
        if inner is None:
            break
        checkpoint = inner
    return checkpoint


def _class_count(name: str, state: dict[str, Tensor]) -> int | None:
    """Return the number of classes of a state dict when it is not the usual one.

    It is the length of the last tensor that differs from the usual model's in its first dimension alone.
    """
    with torch.device("meta"):
        usual = _build(name, None, state).state_dict()
    for key, value in reversed(usual.items()):
        other = state.get(key)
        if other is not None and other.dim() > 0 and other.shape != value.shape and other.shape[1:] == value.shape[1:]:
            return len(other)
    return None


def _fill(module: nn.Module, state: dict[str, Tensor], name: str, path: Path) -> None:
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        own = module.state_dict()
        missing, extra = own.keys() - state.keys(), state.keys() - own.keys()
        wrong = [key for key in own.keys() & state.keys() if own[key].shape != state[key].shape]
        example = f", for example {sorted(missing or extra or wrong)[0]!r}" if missing or extra or wrong else ""
        raise ModelError(
            f"{path} does not fit {name}: {len(missing)} tensors are missing, {len(extra)} unknown and {len(wrong)} of "
            f"another shape{example}"
        ) from error


@functools.lru_cache(maxsize=2)
def _remembered(name: str, device: str) -> LoadedModel:
    """Load a model by name; the last two are kept, so that calling ``explain`` in a loop does not read them anew."""
    return load_model(name, device=device)


def as_model(
    model: nn.Module | str | LoadedModel,
    *,
    preprocess: Preprocess | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
) -> LoadedModel:
    """Return a model, given as a module or by name, together with its preprocessing and labels.

    The caller's own module is used where it is: it is never moved to another device.

    Raises:
        ModelError: an unknown name, a module that cannot carry hooks, or one on another device than asked for.
        InputError: ``preprocess`` or ``labels`` is of another kind.
    """
    names = as_labels(labels)
    _check_preprocess(preprocess)
    if isinstance(model, str):
        model = _remembered(model, str(pick_device(device)))
    if isinstance(model, LoadedModel):
        _check_place(model.module, device)
        return replace(model, preprocess=preprocess or model.preprocess, labels=names or model.labels)
    if not isinstance(model, nn.Module):
        raise ModelError(f"a model is a torch.nn.Module or a name, not a {type(model).__name__}")
    module = unwrapped(model)
    _check_place(module, device)
    if any(is_lazy(tensor) for tensor in itertools.chain(module.parameters(), module.buffers())):
        raise ModelError("the model has lazy layers that have not seen an input yet; run it once, then explain it")
    if any(tensor.is_inference() for tensor in itertools.chain(module.parameters(), module.buffers())):
        raise ModelError(
            "the model was built inside torch.inference_mode(), which rules gradients out for good; build it outside"
        )
    return LoadedModel(module, type(module).__name__, preprocess, names)


def as_labels(labels: Labels | None) -> tuple[str, ...] | None:
    """Return the classes' names in the order of their indices, given in that order or as a mapping from index to name.

    Raises:
        InputError: text, a mapping whose keys are not the indices from 0, or names that are neither text nor numbers.
    """
    if labels is None:
        return None
    if isinstance(labels, Mapping):
        by_index = {str(index): name for index, name in labels.items()}
        if set(by_index) != {str(index) for index in range(len(by_index))}:
            raise InputError("labels given as a dictionary must name every class by its index: {0: 'cat', 1: 'dog'}")
        labels = [by_index[str(index)] for index in range(len(by_index))]
    if isinstance(labels, (str, Set)) or not isinstance(labels, Iterable):
        raise InputError(f"labels are the names of the classes, as in ['cat', 'dog'], not {labels!r}")
    names = list(labels)
    strange = [name for name in names if not isinstance(name, (str, int))]
    if strange:
        raise InputError(f"labels are the names of the classes, as in ['cat', 'dog'], and {strange[0]!r} is no name")
    return tuple(map(str, names)) or None


def _check_preprocess(preprocess: Any) -> None:
    made_by = preprocess.func if isinstance(preprocess, functools.partial) else preprocess
    if isinstance(made_by, type):
        raise InputError(
            f"preprocess is {made_by.__name__} itself, which makes a preprocessing; call it, as in weights.transforms()"
        )
    if preprocess is not None and not callable(preprocess):
        raise InputError(f"preprocess is a function from a PIL picture to a tensor, not {preprocess!r}")


def _check_place(module: nn.Module, device: str | torch.device | None) -> None:
    here = device_of(module)
    if device is None:
        return
    asked = pick_device(device)
    if asked.type != here.type or asked.index not in (None, here.index):
        raise ModelError(
            f"the model is on {here} and {str(device)!r} was asked for; camkit does not move your model: call "
            f"model.to({str(device)!r}) first"
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DataParallel and torch.compile wrappers.

    Raises:
        ModelError: a TorchScript module, whose layers cannot carry hooks.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError("a TorchScript module's layers cannot be watched; pass the Python module it was made from")
    if isinstance(model, _WRAPPERS):
        return unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def about_channels(module: nn.Module, inputs: Tensor) -> str | None:
    """Return what is wrong with the number of channels, where that can explain why the model failed."""
    first = next((part for part in module.modules() if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d))), None)
    if first is None or first.in_channels == inputs.shape[1]:
        return None
    return f"the picture has {inputs.shape[1]} channels and the model's first convolution takes {first.in_channels}"


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer; the CPU where it has none."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the floating-point type of the module's first parameter, which its input must have."""
    return next((tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()), torch.float32)
