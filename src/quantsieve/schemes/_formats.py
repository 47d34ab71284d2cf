"""The integers that static schemes are written in, chosen once for all layers of a run.

Types, symmetry and the form of the file are independent of each other and of granularity, which is the schemes' own:
`scheme.under(formats)` is the same scheme in other integers.
"""

from dataclasses import asdict, dataclass

from quantsieve.errors import UsageError

AUTO = "auto"
WEIGHT_TYPES = ("s8", "u8", "s7")
ACTIVATION_TYPES = ("u8", "s8")
QDQ, QOPERATOR = "qdq", "qoperator"
FILE_FORMATS = (QDQ, QOPERATOR)
SYMMETRIC = "-symmetric"  # ends the name of an activation format whose zero point is the middle of its type
_INTEGERS = {"u8": "uint8", "s8": "int8"}


@dataclass(frozen=True, slots=True)
class Grid:
    """The integers that a weight may become, as signed ones; stored unsigned they are 128 more.

    is_symmetric: whether the zero point is 0; otherwise the grid spans the range of the weights, zero included.
    """

    least: int = -127  # symmetric s8 is without -128, so that u8 with zero point 128 holds the same numbers
    most: int = 127
    is_symmetric: bool = True


SYMMETRIC_8 = Grid()
# As onnxruntime's reduce_range: two products with the largest activation, 2 * 255 * 64, fit 16 signed bits.
SYMMETRIC_7 = Grid(-64, 64)


@dataclass(frozen=True, slots=True)
class Formats:
    """weight_type: 's8', 'u8', which hold the same numbers, 's7', which are s8 of half the range, or 'auto': s8 or u8,
    what the target multiplies exactly. activation_type: of 8-bit activations, 'u8' or 's8'. symmetric_activations:
    whether their zero point is the middle of the type for every tensor. asymmetric_weights: whether weights have the
    zero point that their range asks for. file_format: 'qdq', or 'qoperator' for integer operators. Raises UsageError
    for other names, and for unsigned weights of signed activations in integer operators, which onnxruntime has not."""

    weight_type: str = AUTO
    activation_type: str = "u8"
    symmetric_activations: bool = False
    asymmetric_weights: bool = False
    file_format: str = QDQ

    def __post_init__(self) -> None:
        _check("a weight type", self.weight_type, (AUTO, *WEIGHT_TYPES))
        _check("an activation type", self.activation_type, ACTIVATION_TYPES)
        _check("a file format", self.file_format, FILE_FORMATS)
        if self.weight_type == "u8" and not self.takes_unsigned:
            known = ", ".join(x for x in (AUTO, *WEIGHT_TYPES) if x != "u8")
            raise UsageError(f"a weight type {known} with s8 activations and qoperator", "u8", "Choose one of them.")

    @property
    def activation(self) -> str:
        """The format of 8-bit activations, as `Scheme.activation` has it."""
        return _INTEGERS[self.activation_type] + (SYMMETRIC if self.symmetric_activations else "")

    @property
    def takes_unsigned(self) -> bool:
        """Whether weights may be stored unsigned."""
        return not (self.file_format == QOPERATOR and self.activation_type == "s8")

    @property
    def products(self) -> Grid:
        """Of symmetric weights that are multiplied as integers."""
        return SYMMETRIC_7 if self.weight_type == "s7" else SYMMETRIC_8

    @property
    def weights(self) -> Grid:
        """Of the weights of static int8."""
        if not self.asymmetric_weights:
            return self.products
        return Grid(-64, 63, False) if self.weight_type == "s7" else Grid(-128, 127, False)

    def changed(self) -> dict[str, object]:
        """What is not as in standard formats, the weight type apart."""
        standard = asdict(STANDARD)
        return {k: v for k, v in asdict(self).items() if k != "weight_type" and v != standard[k]}

    def numbers(self) -> dict[str, object]:
        """What decides numbers and is not as in standard formats; what a content key holds of them."""
        found = {k: v for k, v in self.changed().items() if k != "file_format"}
        return {"weight_type": "s7", **found} if self.weight_type == "s7" else found

    def document(self) -> dict[str, object]:
        """The weight type, and what else is not as in standard formats."""
        return {"weight_type": self.weight_type, **self.changed()}


def integer_type(form: str) -> str:
    """The numpy name of the integers of an activation format with calibrated ranges."""
    return form.removesuffix(SYMMETRIC)


def _check(what: str, found: str, known: tuple[str, ...]) -> None:
    if found not in known:
        raise UsageError(f"{what} {', '.join(known[:-1])} or {known[-1]}", repr(found), "Choose one of them.")


STANDARD = Formats()
