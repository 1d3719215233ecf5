"""Simple pictures of areas, drawn by Pillow, which is not packed into executables."""

from collections.abc import Sequence

import numpy as np

from pipeline.core.arrays import AnyArray

Point = Sequence[float] | AnyArray

PAPER, FLOOR, INK, GRAY = "#ffffff", "#eef1f5", "#2b3440", "#b3bcc9"
BLUE, RED, GREEN, AMBER = "#2f6fde", "#d6453d", "#2f9e5b", "#e8a33a"
LONGEST_SIDE = 320  # number of pixels along the longer side of a picture
# Pictures are drawn larger by this factor and then reduced, because Pillow draws jagged edges.
_FINER = 2


class Canvas:
    """A picture of the rectangle between two corners, seen from above: x to the right, y up."""

    def __init__(self, low: Point, high: Point) -> None:
        from PIL import Image, ImageDraw

        self._low, self._high = np.asarray(low, float), np.asarray(high, float)
        extent = self._high - self._low
        self._scale = _FINER * LONGEST_SIDE / extent.max()
        # The numbers of pixels are even, because video codecs need even numbers.
        size = 2 * _FINER * np.rint(extent * self._scale / (2 * _FINER)).astype(int)
        self._image = Image.new("RGB", (int(size[0]), int(size[1])), PAPER)
        self._draw = ImageDraw.Draw(self._image)

    def _at(self, point: Point) -> tuple[float, float]:
        x, y = (np.asarray(point, float) - self._low) * self._scale
        # Rows of pixels are counted from the top, and y from below.
        return float(x), float(self._image.height - y)

    def box(self, low: Point, high: Point, color: str) -> None:
        """Fill the rectangle between two corners."""
        (left, bottom), (right, top) = self._at(low), self._at(high)
        self._draw.rectangle((left, top, right, bottom), fill=color)

    def disc(self, center: Point, radius: float, color: str) -> None:
        """Fill a circle."""
        x, y = self._at(center)
        r = radius * self._scale
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=color)

    def polygon(self, points: Sequence[Point] | AnyArray, color: str) -> None:
        """Fill the polygon with these corners."""
        self._draw.polygon([self._at(point) for point in points], fill=color)

    def line(self, points: Sequence[Point] | AnyArray, width: float, color: str) -> None:
        """Draw connected lines of a width in units of the world, at least 1 pixel."""
        pixels = max(1, round(width * self._scale))
        self._draw.line([self._at(point) for point in points], color, pixels, joint="curve")

    def plus(self, center: Point, radius: float, color: str) -> None:
        """Draw an upright cross."""
        x, y = center
        self.line([(x - radius, y), (x + radius, y)], 0.7 * radius, color)
        self.line([(x, y - radius), (x, y + radius)], 0.7 * radius, color)

    def ex(self, center: Point, radius: float, color: str) -> None:
        """Draw a diagonal cross."""
        x, y = center
        self.line([(x - radius, y - radius), (x + radius, y + radius)], 0.6 * radius, color)
        self.line([(x - radius, y + radius), (x + radius, y - radius)], 0.6 * radius, color)

    def walker(self, center: Point, forward: Point, radius: float, color: str = BLUE) -> None:
        """Draw an agent that faces in the direction of the unit vector `forward`."""
        self.disc(center, radius, color)
        tip = np.asarray(center) + 0.55 * radius * np.asarray(forward)
        self.disc(tip, 0.35 * radius, PAPER)

    def text(self, center: Point, text: str, height: float, color: str = INK) -> None:
        """Write a text with its middle at a point."""
        from PIL import ImageFont

        font = ImageFont.load_default(height * self._scale)
        self._draw.text(self._at(center), text, fill=color, font=font, anchor="mm")

    def pixels(self) -> AnyArray:
        """Return the picture, uint8 [height, width, 3], RGB."""
        return np.asarray(self._image.reduce(_FINER))
