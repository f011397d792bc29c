"""Draws a packed pair, as `trl_tpu.packing` packs it: `python packed_pair.py > packed_pair.svg`.

Above, the pair as padded rows hold it. Below, its one packed row with the numbers that the model is given, and which
token sees which.
"""

import numpy as np

from trl_tpu.data.collate import sequences_of
from trl_tpu.packing.pack import pack_unpadded

PROMPT, CHOSEN, REJECTED = ["Is", "7", "prime", "?"], ["Yes", ",", "it", "is"], ["No"]
COLORS = {  # fill and text
    "prompt": ("#d6e6ff", "#12305e"),
    "chosen": ("#cdf0d3", "#14472a"),
    "rejected": ("#ffdfc2", "#6b2f06"),
    "padding": ("#eceff3", "#6b7380"),
}
INK, FAINT, PANEL = "#1f2328", "#59636e", "#ffffff"  # the picture has its own background: it reads in dark pages too
CELL, HEIGHT, SQUARE, LEFT = 62, 30, 21, 150
WIDTH = LEFT + 9 * CELL + 30

Token = tuple[str, str]  # its text, and what it is part of


def text(x: float, y: float, words: str, color: str = INK, size: int = 14, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}"/>'


def token_row(y: float, tokens: list[Token]) -> list[str]:
    """The tokens of a row, each in its cell."""
    shapes = []
    for column, (word, kind) in enumerate(tokens):
        fill, color = COLORS[kind]
        x = LEFT + column * CELL
        shapes += [box(x, y, CELL - 4, HEIGHT, fill), text(x + CELL / 2 - 2, y + 20, word, color, anchor="middle")]
    return shapes


def word_row(y: float, name: str, words: list[str]) -> list[str]:
    """A number or a word below each cell."""
    shown = [text(LEFT + i * CELL + CELL / 2 - 2, y, word, size=13, anchor="middle") for i, word in enumerate(words)]
    return [text(20, y, name, FAINT, 13), *shown]


def grid(x: float, y: float, tokens: list[Token], subtree_end_L: np.ndarray) -> list[str]:
    """Who sees whom: a line for each token that looks, a square for each token that it sees."""
    shapes = []
    for query, (word, kind) in enumerate(tokens):
        line = y + query * SQUARE
        shapes.append(text(x - 8, line + 15, word, COLORS[kind][1], 13, "end"))
        for key, (_, seen) in enumerate(tokens):
            sees = key <= query < subtree_end_L[key]
            fill = COLORS[seen][0] if sees else "none"
            shapes.append(
                f'<rect x="{x + key * SQUARE}" y="{line}" width="{SQUARE - 2}" height="{SQUARE - 2}" fill="{fill}" '
                f'stroke="{COLORS[seen][1] if sees else "#d0d7de"}" stroke-width="{0.8 if sees else 0.6}"/>'
            )
    return shapes


def picture() -> str:
    """The picture as SVG."""
    words = [*PROMPT, *CHOSEN, *REJECTED]
    ids = list(range(1, 1 + len(words)))
    prompt, chosen, rejected = ids[: len(PROMPT)], ids[len(PROMPT) : -len(REJECTED)], ids[-len(REJECTED) :]
    pair = {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
    (packed,) = pack_unpadded(sequences_of([pair], pad_token_id=0))
    assert packed.position_ids_RL is not None and packed.subtree_end_RL is not None  # as in every packed row
    (row_L,), (position_L,), (end_L,) = packed.input_ids_RL, packed.position_ids_RL, packed.subtree_end_RL
    parts = ["prompt"] * len(PROMPT) + ["chosen"] * len(CHOSEN) + ["rejected"] * len(REJECTED)
    tokens = [(words[token - 1], parts[token - 1]) for token in row_L]
    missing = len(CHOSEN) - len(REJECTED)
    padded = [
        [*((word, "prompt") for word in PROMPT), *((word, "chosen") for word in CHOSEN)],
        [*((word, "prompt") for word in PROMPT), *((word, "rejected") for word in REJECTED)]
        + [("pad", "padding")] * missing,
    ]
    read_there = ["reward" if column in packed.token_column_S else "" for column in range(len(tokens))]
    below = 332
    side = LEFT + 9 * SQUARE + 40
    shapes = [
        text(20, 34, f"Padded rows: {2 * len(padded[0])} tokens computed, the prompt twice", size=15),
        text(20, 70, "chosen", FAINT, 13),
        *token_row(50, padded[0]),
        text(20, 106, "rejected", FAINT, 13),
        *token_row(86, padded[1]),
        text(20, 158, f"A packed row: {len(tokens)} tokens computed, every shared token once", size=15),
        text(20, 194, "prompt | tail | tail", FAINT, 13),
        *token_row(174, tokens),
        *word_row(224, "position_ids", list(map(str, position_L))),
        *word_row(246, "subtree_end", list(map(str, end_L))),
        *word_row(268, "read there", read_there),
        text(20, below - 16, "Who sees whom", size=15),
        *grid(LEFT, below, tokens, end_L),
        text(side, below + 34, "Token q sees token k exactly when", size=14),
        text(side, below + 56, "k ≤ q &lt; subtree_end[k].", size=14),
        text(side, below + 96, "Both answers see the prompt, not each other.", FAINT, 13),
        text(side, below + 124, "A position is the place in its own conversation:", FAINT, 13),
        text(side, below + 142, f"“{REJECTED[0]}” is at {position_L[-1]}, right behind the prompt.", FAINT, 13),
    ]
    height = below + 9 * SQUARE + 24
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif" role="img">'
    )
    title = "<title>A pair in padded rows, and in one packed row: prompt, chosen tail, rejected tail</title>"
    panel = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="{PANEL}" stroke="#d0d7de"/>'
    return "\n".join([head, title, panel, *shapes, "</svg>"])


if __name__ == "__main__":
    print(picture())
