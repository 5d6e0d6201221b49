"""Models by name, and how a model's numbers travel."""

from fedsparse.models.arrays import frozen_names, load_arrays, model_arrays
from fedsparse.models.zoo import MODELS, build_model, check_model

__all__ = ["MODELS", "build_model", "check_model", "frozen_names", "load_arrays", "model_arrays"]
