"""Samples: what the model is fed with, whatever it was read from.

`open_samples` reads image folders, array files and Python objects; `SyntheticSamples` makes some up; `split`
divides them. Each source is one module and answers the protocol `Samples`.
"""

from quantsieve.data.open import open_samples
from quantsieve.data.preprocess import Preprocess
from quantsieve.data.samples import Cached, InputSpec, Samples, batches
from quantsieve.data.split import Split, split
from quantsieve.data.synthetic import SyntheticSamples

__all__ = [
    "Cached",
    "InputSpec",
    "Preprocess",
    "Samples",
    "Split",
    "SyntheticSamples",
    "batches",
    "open_samples",
    "split",
]
