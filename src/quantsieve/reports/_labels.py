"""Where a label goes in a crowded picture: beside its point, on the side where it hides fewest points and bars.

Places are tried on rings around the point, the nearest ring first; what was placed is in the way of what follows. The
page and the picture share it; coordinates are the caller's, y grows downward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

# Where the label lies as seen from its point: beside, above and below it first, then what lies between.
_SHARES = (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)
_SIDES = sorted(
    ((dx, dy) for dx in _SHARES for dy in _SHARES if max(abs(dx), abs(dy)) == 1),
    key=lambda side: (abs(side[0] * side[1]), side[0] == 0, -side[0], side[1]),
)
_RINGS = 24
_WORTH = 10  # gaps that a label may lie further away to hide one thing less


@dataclass(frozen=True, slots=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def holds(self, other: "Box") -> bool:
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The place of the box that is nearest to (x, y)."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)

    def distance(self, x: float, y: float) -> float:
        near_x, near_y = self.nearest(x, y)
        return float(((near_x - x) ** 2 + (near_y - y) ** 2) ** 0.5)


def place(
    point: tuple[float, float],
    size: tuple[float, float],
    taken: Sequence[Box],
    frame: Box,
    gap: float,
    labels: Sequence[Box] = (),
) -> Box:
    """The box of a label of this size (width, height) for the point: few overlaps with `taken`, and near.

    It lies in the frame wherever one of that size fits beside the point; gap: least distance from the point, and the
    step from ring to ring. labels: those of `taken` that a line from the point to its label may not cross either.
    """
    boxes = list(_boxes(point, size, gap))
    inside = [box for box in boxes if frame.holds(box)] or boxes
    best, least = inside[0], float("inf")
    for box in sorted(inside, key=lambda box: box.distance(*point)):
        distance = box.distance(*point)
        if distance >= least:
            break
        line = line_boxes(point, box.nearest(*point)) if labels else ()
        crossed = sum(any(part.overlaps(label) for part in line) for label in labels)
        cost = distance + _WORTH * gap * (crossed + sum(box.overlaps(other) for other in taken))
        if cost < least:
            best, least = box, cost
    return best


def line_boxes(start: tuple[float, float], end: tuple[float, float], parts: int = 16) -> tuple[Box, ...]:
    """A line as small boxes."""
    (x, y), (to_x, to_y) = start, end
    corners = [(x + (to_x - x) * i / parts, y + (to_y - y) * i / parts) for i in range(parts + 1)]
    return tuple(
        Box(min(a[0], b[0]) - 1, min(a[1], b[1]) - 1, max(a[0], b[0]) + 1, max(a[1], b[1]) + 1)
        for a, b in pairwise(corners)
    )


def _boxes(point: tuple[float, float], size: tuple[float, float], gap: float) -> Iterator[Box]:
    (x, y), (width, height) = point, size
    for ring in range(1, _RINGS + 1):
        for dx, dy in _SIDES:
            left = x + dx * (ring * gap + width / 2) - width / 2
            top = y + dy * (ring * gap + height / 2) - height / 2
            yield Box(left, top, left + width, top + height)
