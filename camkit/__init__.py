"""camkit shows which pixels a vision model used.

    >>> import camkit
    >>> explanation = camkit.explain("demo-fair", camkit.scenes.scene_paths()["plane-sky"])
    >>> explanation.label
    'plane'

Each name is imported when it is first used, so that ``import camkit`` and ``camkit --help`` do not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from camkit import errors, hooks, methods, metrics, scale, targets, tensorboard
    from camkit.background.check import check
    from camkit.background.mend import MendResult, mend
    from camkit.background.outlines import regions
    from camkit.background.result import CheckResult
    from camkit.demo import scenes
    from camkit.errors import CamkitError
    from camkit.explaining.explainer import Explainer, explain, explain_many
    from camkit.explaining.explanation import Explanation
    from camkit.explaining.export import export
    from camkit.inspect import Concepts, Diagnosis, diagnose, factorise
    from camkit.inspect.feature_maps import feature_maps
    from camkit.methods import METHODS, register_method
    from camkit.metrics.compare import Comparison, compare
    from camkit.metrics.judge import MethodJudgement, judge
    from camkit.metrics.slide import slide
    from camkit.metrics.versus import ModelComparison, compare_models
    from camkit.models import black_box, load_model
    from camkit.sentences import Word, Words, words
    from camkit.types import Failure, TargetLayer

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "CamkitError",
    "CheckResult",
    "Comparison",
    "Concepts",
    "Diagnosis",
    "Explainer",
    "Explanation",
    "Failure",
    "MendResult",
    "MethodJudgement",
    "ModelComparison",
    "TargetLayer",
    "Word",
    "Words",
    "__version__",
    "black_box",
    "check",
    "compare",
    "compare_models",
    "diagnose",
    "errors",
    "explain",
    "explain_many",
    "export",
    "factorise",
    "feature_maps",
    "hooks",
    "judge",
    "load_model",
    "mend",
    "methods",
    "metrics",
    "regions",
    "register_method",
    "scale",
    "scenes",
    "slide",
    "targets",
    "tensorboard",
    "words",
]

_HOMES = {
    "METHODS": "methods",
    "CamkitError": "errors",
    "CheckResult": "background.result",
    "Comparison": "metrics.compare",
    "Concepts": "inspect",
    "Diagnosis": "inspect",
    "Explainer": "explaining.explainer",
    "Explanation": "explaining.explanation",
    "Failure": "types",
    "MendResult": "background.mend",
    "MethodJudgement": "metrics.judge",
    "ModelComparison": "metrics.versus",
    "TargetLayer": "types",
    "Word": "sentences",
    "Words": "sentences",
    "black_box": "models",
    "check": "background.check",
    "compare": "metrics.compare",
    "compare_models": "metrics.versus",
    "diagnose": "inspect",
    "explain": "explaining.explainer",
    "explain_many": "explaining.explainer",
    "export": "explaining.export",
    "factorise": "inspect",
    "feature_maps": "inspect.feature_maps",
    "judge": "metrics.judge",
    "load_model": "models",
    "mend": "background.mend",
    "regions": "background.outlines",
    "register_method": "methods",
    "slide": "metrics.slide",
    "words": "sentences",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"camkit.{_HOMES[name]}"), name)
    if name in __all__:
        return importlib.import_module("camkit.demo.scenes" if name == "scenes" else f"camkit.{name}")
    raise AttributeError(f"module 'camkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
