"""Figures as SVG text: points, lines and bars in one pair of axes, linear or logarithmic.

    figure = Figure("T_load_kv", x="blocks", y="ms")
    figure.points("measured", [(8, 0.4), (16, 0.8)])
    figure.line("fitted", [(0, 0.01), (16, 0.8)])
    text = figure.svg()                       # or page([figure, …], columns=2): several in one picture

Series of one name share a colour and one entry of the legend. The same numbers give the same text, so that pictures can be
compared as files. Bars are grouped by category: `figure.bars("act-only", {"opt-30b": 5.9})`.
"""

import math
from html import escape

_COLOURS = ("#2563a8", "#d1603d", "#2f8f5b", "#8a5fb0", "#b58a1b", "#4a9fb5", "#a8456b", "#6b6b6b")
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 46
_LEGEND_ROW = 15
_LETTER = 6.2  # approximate width of a letter at 11 px


class Figure:
    def __init__(self, title, x="", y="", width=480, height=320, log_x=False, log_y=False):
        self.title, self.x, self.y = title, x, y
        self.width, self.height = width, height
        self._log = (log_x, log_y)
        self._series = []  # (how it is drawn, name, data)
        self._categories = []

    def points(self, name, data):
        """`data`: (x, y) pairs, here and below."""
        return self._add("points", name, data)

    def line(self, name, data, dashed=False):
        return self._add("dashed" if dashed else "line", name, data)

    def bars(self, name, values):
        """`values`: {category: y}. The categories of all bars lie along x, in the order of their first use."""
        self._categories += [category for category in values if category not in self._categories]
        self._series.append(("bars", name, dict(values)))
        return self

    def _add(self, how, name, data):
        kept = [(float(x), float(y)) for x, y in data]
        for index, name_of_axis in enumerate("xy"):
            if self._log[index] and any(pair[index] <= 0 for pair in kept):
                raise ValueError(f"{self.title}: {name}: a logarithmic {name_of_axis} axis has no place for 0 and below")
        self._series.append((how, name, kept))
        return self

    def svg(self):
        return _document(self.width, self.height, self._body())

    def _body(self):
        names = list(dict.fromkeys(name for _, name, _ in self._series if name))
        colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
        legend, legend_height = self._legend(names, colours)
        box = (_LEFT, _TOP + legend_height, self.width - _RIGHT, self.height - _BOTTOM)
        xs, ys = self._scales(box)
        parts = [_text(self.width / 2, 18, self.title, size=14, anchor="middle", weight="bold"), *legend]
        parts += self._axes(box, xs, ys)
        for how, name, data in self._series:
            parts += self._draw(how, name, data, colours.get(name, _COLOURS[0]), box, xs, ys)
        return "\n".join(parts)

    def _legend(self, names, colours):
        """Entries in rows; a new row begins when one is full."""
        parts, at, row = [], _LEFT, 0
        for name in names if len(names) > 1 else ():
            needed = 18 + _LETTER * len(name) + 12
            if at > _LEFT and at + needed > self.width - _RIGHT:
                at, row = _LEFT, row + 1
            middle = 32 + _LEGEND_ROW * row
            parts.append(f'<rect x="{_n(at)}" y="{_n(middle - 4)}" width="12" height="8" fill="{colours[name]}"/>')
            parts.append(_text(at + 18, middle + 4, name))
            at += needed
        return parts, (row + 1) * _LEGEND_ROW if parts else 0

    def _scales(self, box):
        xs, ys = [], []
        for how, _, data in self._series:
            if how == "bars":
                ys += [float(value) for value in data.values()]
            else:
                xs += [x for x, _ in data]
                ys += [y for _, y in data]
        if self._categories:
            across = _Scale([0.0, float(len(self._categories))], box[0], box[2], False, exact=True)
        else:
            across = _Scale(xs if self._log[0] else [0.0, *xs], box[0], box[2], self._log[0])
        return across, _Scale(ys if self._log[1] else [0.0, *ys], box[3], box[1], self._log[1])

    def _axes(self, box, xs, ys):
        left, top, right, bottom = box
        parts = []
        for value in ys.ticks():
            at = ys.place(value)
            parts.append(_stroke(left, at, right, at, "#e3e3e3"))
            parts.append(_text(left - 6, at + 4, _number(value), anchor="end"))
        if self._categories:
            for index, category in enumerate(self._categories):
                parts.append(_text(xs.place(index + 0.5), bottom + 16, category, anchor="middle"))
        else:
            for value in xs.ticks():
                at = xs.place(value)
                parts.append(_stroke(at, bottom, at, bottom + 4, "#444444"))
                parts.append(_text(at, bottom + 16, _number(value), anchor="middle"))
        parts += [_stroke(left, bottom, right, bottom, "#444444"), _stroke(left, top, left, bottom, "#444444")]
        parts.append(_text((left + right) / 2, self.height - 10, self.x, anchor="middle"))
        middle = (top + bottom) / 2
        turned = f'transform="rotate(-90 14 {_n(middle)})"'
        parts.append(_text(14, middle, self.y, anchor="middle", extra=turned))
        return parts

    def _draw(self, how, name, data, colour, box, xs, ys):
        if how == "bars":
            return self._draw_bars(name, data, colour, box, xs, ys)
        if how == "points":
            return [
                f'<circle cx="{_n(xs.place(x))}" cy="{_n(ys.place(y))}" r="3" fill="{colour}" fill-opacity="0.75"/>'
                for x, y in data
            ]
        path = " ".join(f"{_n(xs.place(x))},{_n(ys.place(y))}" for x, y in data)
        dashes = ' stroke-dasharray="5 4"' if how == "dashed" else ""
        return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>']

    def _draw_bars(self, name, values, colour, box, xs, ys):
        groups = list(dict.fromkeys(other for how, other, _ in self._series if how == "bars"))
        width = 0.8 / len(groups)
        parts = []
        for index, category in enumerate(self._categories):
            if category not in values:
                continue
            left = xs.place(index + 0.1 + width * groups.index(name))
            across = xs.place(index + 0.1 + width * (groups.index(name) + 1)) - left - 1
            end, base = ys.place(values[category]), ys.floor()
            top, height = min(end, base), abs(base - end)
            parts.append(
                f'<rect x="{_n(left)}" y="{_n(top)}" width="{_n(across)}" height="{_n(height)}" fill="{colour}"/>'
            )
        return parts


class Timeline:
    """Tracks along one time axis. Spans are (track, kind, begin, end), coloured by kind."""

    def __init__(self, title, spans, x="ms", width=960):
        self.title, self.x, self.width = title, x, width
        self._spans = [(track, kind, float(begin), float(end)) for track, kind, begin, end in spans]
        self._tracks = list(dict.fromkeys(track for track, _, _, _ in self._spans))
        self.height = _TOP + _LEGEND_ROW + 34 * max(1, len(self._tracks)) + _BOTTOM

    def svg(self):
        return _document(self.width, self.height, self._body())

    def _body(self):
        kinds = list(dict.fromkeys(kind for _, kind, _, _ in self._spans))
        colours = {kind: _COLOURS[i % len(_COLOURS)] for i, kind in enumerate(kinds)}
        top, bottom = _TOP + _LEGEND_ROW, self.height - _BOTTOM
        parts, at = [_text(self.width / 2, 18, self.title, size=14, anchor="middle", weight="bold")], _LEFT
        for kind in kinds:
            parts.append(f'<rect x="{_n(at)}" y="28" width="12" height="8" fill="{colours[kind]}"/>')
            parts.append(_text(at + 18, 36, kind))
            at += 30 + _LETTER * len(kind)
        across = _Scale([0.0, *(end for _, _, _, end in self._spans)], _LEFT, self.width - _RIGHT, False)
        for value in across.ticks():
            place = across.place(value)
            parts.append(_stroke(place, top, place, bottom, "#e3e3e3"))
            parts.append(_text(place, bottom + 16, _number(value), anchor="middle"))
        for index, track in enumerate(self._tracks):
            parts.append(_text(_LEFT - 6, top + 34 * index + 21, track, anchor="end"))
        for track, kind, begin, end in self._spans:
            left, row = across.place(begin), top + 34 * self._tracks.index(track) + 5
            size = f'width="{_n(max(across.place(end) - left, 0.3))}" height="24"'
            parts.append(f'<rect x="{_n(left)}" y="{_n(row)}" {size} fill="{colours[kind]}"/>')
        parts += [_stroke(_LEFT, bottom, self.width - _RIGHT, bottom, "#444444")]
        parts.append(_text((_LEFT + self.width - _RIGHT) / 2, self.height - 10, self.x, anchor="middle"))
        return "\n".join(parts)


def page(figures, columns=2):
    """Several figures in one picture, `columns` in a row."""
    rows = [figures[i : i + columns] for i in range(0, len(figures), columns)]
    parts, top, width = [], 0, 0
    for row in rows:
        left = 0
        for figure in row:
            parts.append(f'<g transform="translate({_n(left)} {_n(top)})">\n{figure._body()}\n</g>')
            left += figure.width
        width = max(width, left)
        top += max(figure.height for figure in row)
    return _document(width, top, "\n".join(parts))


class _Scale:
    """Maps values to positions in the picture. The ends are round numbers, or powers of ten."""

    def __init__(self, values, begin, end, log, exact=False):
        finite = [value for value in values if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (1.0, 1.0)
        self._begin, self._end, self._log = begin, end, log
        if log:
            low, high = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
            self._low, self._high = low, max(high, low + 1)
        else:
            self._step = _round_step((high - low) / 5 if high > low else abs(high) or 1.0)
            self._low, self._high = low, high
            if not exact:
                self._low = math.floor(low / self._step + 1e-9) * self._step
                self._high = max(math.ceil(high / self._step - 1e-9) * self._step, self._low + self._step)

    def place(self, value):
        at = math.log10(value) if self._log else value
        return self._begin + (self._end - self._begin) * (at - self._low) / (self._high - self._low)

    def floor(self):
        """The base line of bars: 0, or the low end of a logarithmic axis."""
        return self._begin if self._log else self.place(0.0)

    def ticks(self):
        if self._log:
            step = max(1, (self._high - self._low) // 6)
            return [10.0**power for power in range(self._low, self._high + 1, step)]
        count = round((self._high - self._low) / self._step)
        return [self._low + self._step * i for i in range(count + 1)]


def _round_step(least):
    """The next larger of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _number(value):
    if value == 0:
        return "0"
    return f"{value:.0e}" if abs(value) < 1e-4 or abs(value) >= 1e6 else f"{value:.6g}"


def _n(value):
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _stroke(x1, y1, x2, y2, colour):
    return f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" stroke="{colour}"/>'


def _text(x, y, words, size=11, anchor="start", weight="normal", extra=""):
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="#222222"'
    return f'<text x="{_n(x)}" y="{_n(y)}" {style} {extra}>{escape(str(words))}</text>'.replace(" >", ">")


def _document(width, height, body):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(width)} {_n(height)}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )
