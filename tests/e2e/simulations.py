#!/usr/bin/env python3
"""`poise simulate` from the command line: every experiment has a picture, and the same numbers give the same one."""

import json
import xml.etree.ElementTree as xml

import harness
from harness import expect, expect_equal, test

NAMES = ("capture-table3", "capture-figure1", "capture-figure8", "capture-figure9", "capture-figure10", "kvpr-gains", "ours-beyond")


@test
def every_simulation_is_played_and_drawn(workspace):
    for name in NAMES:
        picture = workspace / f"{name}.svg"
        ended = workspace.poise("simulate", name, "--json", "--svg", picture).expect(0)
        played = json.loads(ended.out)
        expect(played["rows"] and played["notes"], f"{name}: {ended.out[:200]}")
        drawn = xml.parse(picture).getroot()
        rectangles = sum(element.tag.endswith("rect") for element in drawn.iter())
        expect(rectangles > len(played["rows"]), f"{name}: {rectangles} rectangles for {len(played['rows'])} rows")
        if name in NAMES[:2]:
            first = picture.read_bytes()
            workspace.poise("simulate", name, "--svg", picture).expect(0)
            expect_equal(picture.read_bytes(), first, f"{name} drawn twice")


@test
def what_cannot_be_played_or_drawn_is_refused_in_a_sentence(workspace):
    picture = workspace / "picture.svg"
    workspace.poise("simulate", "capture-table9", "--svg", picture).expect(2, "capture-table3")
    expect(not picture.exists(), "a picture of nothing")
    workspace.poise("simulate", "").expect(2, "NAME")
    workspace.poise("simulate", "capture-table3", "--svg", workspace / "no" / "such.svg").expect(2, "such.svg")
    workspace.poise("simulate", "capture-table3", "--svg", "/dev/full").expect(73, "/dev/full")


if __name__ == "__main__":
    raise SystemExit(harness.main())
