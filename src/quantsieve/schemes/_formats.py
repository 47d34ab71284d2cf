"""The integers that static schemes are written in, chosen once for all layers of a run.

Types, symmetry and the form of the file are independent of each other and of granularity, which is the schemes' own:
`scheme.under(formats)` is the same scheme in other integers.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from quantsieve.errors import UsageError

AUTO = "auto"
WEIGHT_TYPES = ("s8", "u8")
ACTIVATION_TYPES = ("u8", "s8")
SYMMETRIC = "-symmetric"  # ends the name of an activation format whose zero point is the middle of its type
_INTEGERS = {"u8": "uint8", "s8": "int8"}


@dataclass(frozen=True, slots=True)
class Formats:
    """weight_type: 's8', 'u8', or 'auto': what the target multiplies exactly; both hold the same numbers.
    activation_type: of 8-bit activations, 'u8' or 's8'. symmetric_activations: whether their zero point is the middle
    of the type for every tensor. Raises UsageError for other names."""

    weight_type: str = AUTO
    activation_type: str = "u8"
    symmetric_activations: bool = False

    def __post_init__(self) -> None:
        _check("a weight type", self.weight_type, (AUTO, *WEIGHT_TYPES))
        _check("an activation type", self.activation_type, ACTIVATION_TYPES)

    @property
    def activation(self) -> str:
        """The format of 8-bit activations, as `Scheme.activation` has it."""
        return _INTEGERS[self.activation_type] + (SYMMETRIC if self.symmetric_activations else "")

    def numbers(self) -> Mapping[str, object]:
        """What decides numbers and is not as in standard formats; what a content key holds of them."""
        changed = self.document()
        del changed["weight_type"]
        return changed

    def document(self) -> dict[str, object]:
        """The weight type, and what else is not as in standard formats."""
        standard = asdict(STANDARD)
        return {k: v for k, v in asdict(self).items() if k == "weight_type" or v != standard[k]}


def integer_type(form: str) -> str:
    """The numpy name of the integers of an activation format with calibrated ranges."""
    return form.removesuffix(SYMMETRIC)


def _check(what: str, found: str, known: tuple[str, ...]) -> None:
    if found not in known:
        raise UsageError(f"{what} {', '.join(known[:-1])} or {known[-1]}", repr(found), "Choose one of them.")


STANDARD = Formats()
