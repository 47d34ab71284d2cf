"""Numbers as people read them: shares in per cent, files in decimal megabytes, times with three digits."""

import math

from quantsieve.evaluation import Estimate
from quantsieve.targets.timing import Latency


def percent(share: float, digits: int = 1) -> str:
    """0.0093 -> '0.9 %'; a share that would round to 0 keeps its first digit: 0.0002 -> '0.02 %'."""
    return f"{_percent_digits(share, digits)} %"


def percent_interval(found: Estimate) -> str:
    """'0.9 % [0.4, 1.8]'."""
    return f"{percent(found.value)} {percent_range(found)}"


def percent_range(found: Estimate) -> str:
    """'[0.4, 1.8]', in per cent; '[0]' where the interval is one point."""
    if found.low == found.high:
        return f"[{_percent_digits(found.low)}]"
    return f"[{_percent_digits(found.low)}, {_percent_digits(found.high)}]"


def _percent_digits(share: float, digits: int = 1) -> str:
    value = 100 * share
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else f"{value}"
    if abs(value) < 0.5 * 10**-digits:
        return f"{value:.1g}"
    return f"{value:.{digits}f}".removesuffix("." + "0" * digits) if abs(value) >= 99.95 else f"{value:.{digits}f}"


def size(num_bytes: float) -> str:
    """'13.6 MB', '42.1 kB', '812 B'; 1 MB is 1,000,000 bytes."""
    for factor, unit in ((1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= 0.9995 * factor:
            return f"{three(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def three(value: float) -> str:
    """Three significant digits without an exponent where that is short: '4.10', '13.6', '0.351',
    '1.2e-05'."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if not -3 <= exponent <= 5:
        return f"{value:.1e}"
    rounded = round(value, 2 - exponent)
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def price(value: float) -> str:
    """A relative squared error with two digits: '0.012', '3.1e-05'."""
    return f"{value:.2g}"


def milliseconds(found: Latency) -> str:
    """'4.10 [4.01, 4.22]': median and its 95 % interval."""
    return f"{three(found.median_ms)} {milliseconds_range(found)}"


def milliseconds_range(found: Latency) -> str:
    return f"[{three(found.low_ms)}, {three(found.high_ms)}]"


def duration(seconds: float) -> str:
    """'42 s', '3 min 20 s', '2 h 5 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def count(number: int, noun: str) -> str:
    """'1 layer', '2 layers', '1,200 samples'."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def tick_percent(share: float) -> str:
    """A round share on an axis: '2 %', '0.5 %'."""
    return f"{100 * share:.3g} %"
