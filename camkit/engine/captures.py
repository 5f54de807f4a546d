"""What each kind of method gets from the model: one function for each kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor, nn

from camkit.engine.capture import Pass, capture, capture_activations, capture_for_cam
from camkit.engine.capture_attention import capture_attention
from camkit.engine.capture_curvature import capture_curvature
from camkit.engine.capture_head import capture_with_head
from camkit.engine.capture_input import capture_guided, capture_parts
from camkit.engine.capture_pictures import capture_with_pictures
from camkit.engine.capture_references import capture_with_references
from camkit.engine.features import Capture, weigh
from camkit.methods.registry import Method, Needs
from camkit.targets.scores import Target

Capturing: TypeAlias = Callable[[nn.Module, Tensor, Sequence[Target], Pass, Method], Capture]
"""``capture(model, inputs, targets, options, method)``; ``capture`` explains the arguments."""

CAPTURES: Mapping[Needs, Capturing] = {
    "gradients": lambda model, inputs, targets, options, _: capture(model, inputs, targets, options),
    "curvature": lambda model, inputs, targets, options, method: capture_curvature(
        model, inputs, targets, options, functools.partial(weigh, method)
    ),
    "head": lambda model, inputs, targets, options, _: capture_for_cam(model, inputs, targets, options),
    "activations": lambda model, inputs, targets, options, _: capture_activations(model, inputs, targets, options),
    "scores": lambda model, inputs, targets, options, method: capture_with_head(
        model, inputs, targets, options, functools.partial(weigh, method)
    ),
    "references": lambda model, inputs, targets, options, method: capture_with_references(
        model, inputs, targets, options, functools.partial(weigh, method)
    ),
    "attention": capture_attention,
    "attention-gradients": capture_attention,
    "attention-by-layer": capture_attention,
    "pictures": capture_with_pictures,
    "parts": lambda model, inputs, targets, options, method: capture_parts(
        model, inputs, targets, options, functools.partial(weigh, method)
    ),
    "guided": lambda model, inputs, targets, options, method: capture_guided(
        model, inputs, targets, options, functools.partial(weigh, method)
    ),
}
"""How a model is run for a method, by what the method needs."""
