"""Values of preprocessing options, from the texts of the command line or the types of TOML.

'127,127,127', [127, 127, 127] and 127 are forms of mean; '256', 256, '32x100' and [32, 100] of a size.
"""

from quantsieve.errors import InputError


def parse_option(key: str, value: object, origin: str) -> object:
    """The value of the option in its own type. Raises InputError with the forms it may have."""
    try:
        if key in ("mean", "std"):
            return _numbers(value)
        if key in ("scale", "pad"):
            return _number(value)
        if key in ("resize", "crop"):
            return _size(value, square=key == "crop")
        if not isinstance(value, str):
            raise ValueError
        return value.lower()
    except ValueError as error:
        forms = {
            "mean": "numbers such as 127 or 127,127,127",
            "std": "numbers such as 128 or 58,57,57",
            "scale": "a number such as 0.00392",
            "pad": "a number such as 114",
            "resize": "a short side such as 256, or a size HxW",
            "crop": "a size such as 224 or HxW",
        }
        raise InputError(
            f"{forms.get(key, 'a name')} for {key}", f"{value!r} in {origin}", "Correct the value."
        ) from error


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    return float(value)


def _numbers(value: object) -> tuple[float, ...]:
    items = value.split(",") if isinstance(value, str) else value
    return tuple(_number(item) for item in (items if isinstance(items, list | tuple) else [items]))


def _size(value: object, square: bool) -> int | tuple[int, int]:
    items = value.lower().split("x") if isinstance(value, str) else value
    sides = [_whole(item) for item in (items if isinstance(items, list | tuple) else [items])]
    if len(sides) not in (1, 2):
        raise ValueError
    if len(sides) == 2:
        return sides[0], sides[1]
    return (sides[0], sides[0]) if square else sides[0]


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return int(value)
