"""The style sheet and the tree share their colours."""

import re

from hf_ddtree.demo.present import LEGEND, MEANINGS
from hf_ddtree.demo.style import COLOURS, STYLE_SHEET


def test_style_sheet_gives_each_chip_the_colours_of_its_nodes():
    for kind, colours in COLOURS.items():
        (rule,) = re.findall(rf"\.chip\.{kind} \{{(.*)\}}", STYLE_SHEET)
        assert re.findall(r"#\w+", rule) == list(colours)


def test_legend_explains_every_colour():
    assert list(MEANINGS) == list(COLOURS)
    assert [kind for kind in COLOURS if f'class="chip {kind}"' not in LEGEND] == []
