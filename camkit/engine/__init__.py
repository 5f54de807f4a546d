"""Running a model once, with the feature maps and gradients of some layers, and leaving it as it was."""
