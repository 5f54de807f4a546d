"""The table of methods: name -> a pure function from features to weights.

A method returns weights that broadcast against the activations (N, C, *grid); their product summed over the channels is
the signed map. Nothing else differs between methods, so a new one is a function of a few lines here in a module of this
package, under ``@register``. The command line, the documentation and the tests read the table.
"""

from camkit.methods import cam as _cam
from camkit.methods import gradient as _gradient
from camkit.methods.table import METHODS, Method, find_method, register

__all__ = ["METHODS", "Method", "find_method", "register"]

del _cam, _gradient
