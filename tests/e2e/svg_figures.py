#!/usr/bin/env python3
"""Figures drawn from numbers: well-formed, in the axes, and the same each time."""

import importlib.util
import json
import xml.etree.ElementTree as xml

from harness import ROOT, expect, expect_equal, main, test
from supervisor.measure.svg import Figure, page

SVG = "{http://www.w3.org/2000/svg}"


def circles(text):
    return [(float(c.get("cx")), float(c.get("cy"))) for c in xml.fromstring(text).iter(SVG + "circle")]


@test
def points_lie_in_proportion_to_their_numbers(_):
    (x0, y0), (x1, y1), (x2, y2) = circles(Figure("t").points("p", [(0, 0), (5, 1), (10, 4)]).svg())
    expect_equal(round((x2 - x0) / (x1 - x0), 2), 2.0, "across")
    expect_equal(round((y2 - y0) / (y1 - y0), 2), 4.0, "up")
    expect(y2 < y1 < y0, "more is higher up")


@test
def on_logarithmic_axes_equal_factors_are_equal_ways(_):
    (x0, y0), (x1, y1), (x2, y2) = circles(
        Figure("t", log_x=True, log_y=True).points("p", [(1, 0.001), (10, 0.1), (100, 10)]).svg()
    )
    expect_equal(round(x2 - x1, 1), round(x1 - x0, 1), "across")
    expect_equal(round(y2 - y1, 1), round(y1 - y0, 1), "up")


@test
def a_logarithmic_axis_refuses_zero(_):
    try:
        Figure("t", log_y=True).points("p", [(1, 0)])
    except ValueError as problem:
        expect("logarithmic" in str(problem), str(problem))
    else:
        expect(False, "0 was drawn on a logarithmic axis")


@test
def bars_are_as_high_as_their_numbers(_):
    text = Figure("t").bars("a", {"x": 2, "y": 4}).bars("b", {"x": 1}).svg()
    bars = [r for r in xml.fromstring(text).iter(SVG + "rect") if float(r.get("height").rstrip("%")) > 8 and r.get("x")]
    heights = [float(bar.get("height")) for bar in bars]
    expect_equal([round(height / heights[2], 2) for height in heights], [2.0, 4.0, 1.0], "heights")


@test
def any_words_make_a_well_formed_picture_and_always_the_same_one(_):
    def draw():
        figures = [Figure("a < b & \"c\"", "x", "y").line("<line>", [(1, 2), (3, -4)]) for _ in range(3)]
        return page([*figures, Figure("nothing to draw")], columns=2)

    xml.fromstring(draw())
    expect_equal(draw(), draw(), "a second drawing")


@test
def the_picture_in_the_readme_is_drawn_from_the_results_that_are_kept(_):
    spec = importlib.util.spec_from_file_location("draw_results", ROOT / "bench" / "draw_results.py")
    draw_results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_results)
    kept = draw_results.RESULTS.with_suffix(".svg")
    expect(str(kept.relative_to(ROOT)) in (ROOT / "README.md").read_text(encoding="utf-8"), "the README does not show it")
    drawn = draw_results.drawing(json.loads(draw_results.RESULTS.read_text(encoding="utf-8")))
    expect_equal(drawn, kept.read_text(encoding="utf-8"), "run bench/draw_results.py")


if __name__ == "__main__":
    raise SystemExit(main())
