"""Where arrays come from, and how they become batches."""

from varlap.data.arrays import KNOWN_NAMES, ArrayData, data_folder, load
from varlap.data.batches import as_batches, count_items
from varlap.data.sources import SOURCES, Archive, Source
from varlap.data.store import Stored, Verification, find_stored, get, verify
from varlap.data.tables import UCI_SETS, Split, TableData, load_uci
from varlap.data.tensors import as_tensors, collate_fn, inputs_as_tensors
from varlap.data.transforms import Normaliser, crop_and_flip

__all__ = [
    "KNOWN_NAMES",
    "SOURCES",
    "UCI_SETS",
    "Archive",
    "ArrayData",
    "Normaliser",
    "Source",
    "Split",
    "Stored",
    "TableData",
    "Verification",
    "as_batches",
    "as_tensors",
    "collate_fn",
    "count_items",
    "crop_and_flip",
    "data_folder",
    "find_stored",
    "get",
    "inputs_as_tensors",
    "load",
    "load_uci",
    "verify",
]
