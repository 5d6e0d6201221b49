"""Data sets and their division among clients."""

from fedsparse.data.dataset import Dataset
from fedsparse.data.datasets import DATASETS, check_dataset, load_dataset
from fedsparse.data.partition import PARTITIONS, Partitioner, label_distribution, partition

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Dataset",
    "Partitioner",
    "check_dataset",
    "label_distribution",
    "load_dataset",
    "partition",
]
