"""Where arrays come from, and how they become batches."""

from varlap.data.arrays import KNOWN_NAMES, ArrayData, data_folder, load
from varlap.data.batches import as_batches, as_tensors, count_items
from varlap.data.transforms import Normaliser, crop_and_flip

__all__ = [
    "KNOWN_NAMES",
    "ArrayData",
    "Normaliser",
    "as_batches",
    "as_tensors",
    "count_items",
    "crop_and_flip",
    "data_folder",
    "load",
]
