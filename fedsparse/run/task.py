"""What the server needs of a scenario: data, model, and how to judge the model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsparse.errors import ConfigError
from fedsparse.heap import keep_freed_memory
from fedsparse.run.environment import cpus
from fedsparse.scenario import Scenario
from fedsparse.scenario.fleet import check_device_memory
from fedsparse.scenario.problems import about

if TYPE_CHECKING:
    from fedsparse.data import Dataset


@lru_cache(maxsize=2)
def _load(name: str, data_dir: str | None) -> "Dataset":
    from fedsparse.data import load_dataset

    return load_dataset(name, data_dir)


class Task:
    """A scenario's data set, its division, and the global model.

    Raises
    ------
    ConfigError, DataError
        Where the data or the user's own model do not work, or do not fit together.
    """

    def __init__(self, scenario: Scenario) -> None:
        from clients.client_app import pick_device
        from fedsparse.data import partition
        from fedsparse.models import build_model, frozen_names, model_arrays

        data, seed = scenario.data, scenario.seed
        with about(f"data.dataset = {data.dataset!r}"):
            self.dataset = _load(data.dataset, data.data_dir)
        with about(f"data.partition = {data.partition!r}"):
            self.parts = partition(data.partition, self.dataset.y_train, data.num_clients, seed, self.dataset.groups)
        self.device = pick_device(scenario.engine.device)
        shape, classes = self.dataset.input_shape, self.dataset.num_classes
        with about(f"model.name = {scenario.model.name!r}"):
            model = build_model(scenario.model.name, shape, classes, seed)
            self.model = model.to(self.device)
            self._try()
        keep_freed_memory()
        self._scenario = scenario
        check_device_memory(scenario, sum(p.numel() for p in self.model.parameters()))
        self.arrays: dict[str, NDArray[Any]] = model_arrays(self.model)
        self.frozen = frozen_names(self.model)

    def _try(self) -> None:
        """Let the model look at two examples, so that a shape that does not fit shows here."""
        import torch

        data = self.dataset
        inputs = torch.from_numpy(np.array(data.x_test[:2])).to(self.device, torch.float32) * data.scale
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        self.model.eval()
        try:
            with torch.no_grad():
                shape = tuple(self.model(inputs.to(dtype)).shape)
        except Exception as error:
            raise ConfigError(
                f"the model does not take the data's examples of shape {data.input_shape}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if shape != (len(inputs), data.num_classes):
            raise ConfigError(
                f"the model must give {data.num_classes} numbers (one a class) for each example; for 2 examples it "
                f"gave an output of shape {shape}."
            )

    @property
    def num_parameters(self) -> int:
        """Numbers in the model, buffers included."""
        return sum(array.size for array in self.arrays.values())

    def evaluate(self, arrays: dict[str, NDArray[Any]]) -> tuple[float, float]:
        """Return loss and accuracy of `arrays` on the test set."""
        from clients.training import evaluate
        from fedsparse.models import load_arrays

        load_arrays(self.model, arrays)
        with _all_threads():
            return evaluate(self.model, self.dataset.x_test, self.dataset.y_test, self.dataset.scale, self.device)

    def objective(self, arrays: dict[str, NDArray[Any]]) -> float:
        """Return f(w): mean cross-entropy over all training examples + weight_decay / 2 ||w||^2, w what is trained."""
        from clients.training import evaluate
        from fedsparse.models import load_arrays

        load_arrays(self.model, arrays)
        data = self.dataset
        with _all_threads():
            loss, _ = evaluate(self.model, data.x_train, data.y_train, data.scale, self.device)
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        squares = sum(float(np.square(arrays[name], dtype=np.float64).sum()) for name in trained if name in arrays)
        return loss + 0.5 * self._scenario.train.weight_decay * squares

    @property
    def mean_steps(self) -> int:
        """Local steps of an average client in a round."""
        train = self._scenario.train
        if train.local_steps is not None:
            return train.local_steps
        mean = sum(part.size for part in self.parts) / len(self.parts)
        return max(1, (train.local_epochs or 1) * ceil(mean / train.batch_size))

    @property
    def flop_per_step(self) -> float:
        """Floating-point operations of one local step: torch counts the forward pass, the backward pass takes twice it.

        What torch does not count (activations, norms) takes little of the time where convolutions and products are.
        """
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        inputs = torch.zeros((1, *self.dataset.input_shape), dtype=dtype, device=self.device)
        self.model.eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.model(inputs)
        return 3.0 * float(counter.get_total_flops()) * self._scenario.train.batch_size

    def division(self) -> dict[str, Any]:
        """Return how many examples of each class each client has."""
        from fedsparse.data import label_distribution

        counts = label_distribution(self.parts, self.dataset.y_train, self.dataset.num_classes)
        return {"dataset": self.dataset.name, "num_classes": self.dataset.num_classes, "label_counts": counts.tolist()}


@contextmanager
def _all_threads() -> Iterator[None]:
    """Let torch use every CPU that OMP_NUM_THREADS allows, and set it back: inline clients want their own number."""
    import torch

    before = torch.get_num_threads()
    limit = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(min(cpus(), int(limit)) if limit.isdecimal() and int(limit) else cpus())
    try:
        yield
    finally:
        torch.set_num_threads(before)
