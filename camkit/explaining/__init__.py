"""From a model and pictures to explanations: the Explainer, its options, and what it returns."""
