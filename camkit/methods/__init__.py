"""The methods: name -> a pure function from feature maps and gradients to weights.

The weights broadcast against the activations (N, C, *grid); their product summed over the channels is the signed map.
Nothing else differs between methods, so a new one is a few lines under ``@register_method``, in a module of this
package or in the user's own code. The command line, the documentation and the tests read the table.
"""

from camkit.methods import activations as _activations
from camkit.methods import cam as _cam
from camkit.methods import gradient as _gradient
from camkit.methods import head_forward as _head_forward
from camkit.methods.registry import (
    METHODS,
    ONE_BY_ONE,
    Method,
    MethodLike,
    WeightFunction,
    check_weights,
    find_method,
    register_method,
)

__all__ = [
    "METHODS",
    "ONE_BY_ONE",
    "Method",
    "MethodLike",
    "WeightFunction",
    "check_weights",
    "find_method",
    "register_method",
]

del _activations, _cam, _gradient, _head_forward
