"""The methods: name -> a pure function from feature maps and gradients to weights.

The weights broadcast against the activations (N, C, *grid); their product summed over the channels is the signed map.
Nothing else differs between methods, so a new one is a few lines under ``@register_method``, in a module of this
package or in the user's own code. The command line, the documentation and the tests read the table.
"""

import importlib

from camkit.methods.registry import (
    AUTO,
    CENTRED,
    METHODS,
    ODAM,
    SHARPENED,
    WEIGHTED,
    Between,
    Method,
    MethodLike,
    WeightFunction,
    Whole,
    find_method,
    known_method,
    register_method,
    variant,
)

__all__ = [
    "AUTO",
    "CENTRED",
    "METHODS",
    "ODAM",
    "SHARPENED",
    "WEIGHTED",
    "Between",
    "Method",
    "MethodLike",
    "WeightFunction",
    "Whole",
    "find_method",
    "known_method",
    "register_method",
    "variant",
]

for _family in ("feature_maps", "changes", "whole_model"):  # in the order in which lists name their methods
    importlib.import_module(f"camkit.methods.{_family}")
