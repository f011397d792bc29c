"""The order in which recurrent layers read unpadded rows: a few batches of sequences, not one call per branch.

A recurrent layer is called once, with the tokens of all tails in one long row. Inside it, two kinds of functions read
tokens in order:

- A convolution reads the long row. It has copies of the last `CONTEXT` tokens of its path before each tail.
- A rule that carries a state reads paths and then rests. A path goes from the start of a tree to a branch. A rest is
  what follows in one sequence. It continues from the state after a path, or starts a tree. Paths are padded on the
  left: there an empty state stays empty. Rests are padded on the right, since nothing follows them.

Rules work on chunks of tokens, so the paths are chosen to make the fewest chunks. A sequence continues one path at
most. In trees with several levels of branches, the rule then reads some tokens again for each sequence.

Letters: T columns of all token rows, E places of the long row, G places of the rule's rows, N sequences.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from .batch import ReadOrder, Tail, Tree
from .shapes import CHUNK

#: Number of earlier tokens that a convolution may read.
CONTEXT = 4


def columns_of(tree: Tree, tail: Tail) -> np.ndarray:
    """Return the columns of a tail's sequence: its path, then the tail."""
    ranges = (*tail.path, (tail.start, tail.stop))
    return np.concatenate([np.arange(tree.start + start, tree.start + stop) for start, stop in ranges])


def read_order(trees: tuple[Tree, ...], columns: int, few_groups: bool) -> ReadOrder[np.ndarray]:
    """Return the order in which recurrent layers read unpadded rows.

    Args:
        trees: The trees of the token rows.
        columns: T.
        few_groups: Whether all paths are one group and all rests another. Otherwise, rows of as many chunks are one
            group, which takes less padding.
    """
    tails = [(tree, tail) for tree in trees for tail in tree.tails]
    sequences = [columns_of(tree, tail) for tree, tail in tails]
    shared_N = np.array([sum(stop - start for start, stop in tail.path) for _, tail in tails])
    with_context = (np.append(np.full(CONTEXT, columns), sequence) for sequence in sequences)
    token_E = np.concatenate([part[shared:] for part, shared in zip(with_context, shared_N.tolist(), strict=True)])
    place_T, places = np.zeros(columns + 1, np.int64), len(token_E)
    place_T[token_E[::-1]] = np.arange(places)[::-1]  # the first place of a column: its copies follow it
    place_T[columns] = places

    _, branches = _choose_branches(np.array(list(map(len, sequences))), shared_N, 0, len(tails))
    paths, rests, path_N = list[np.ndarray](), list(sequences), np.full(len(tails), len(branches))
    for depth, first, stop in branches:
        path_N[first:stop] = len(paths)
        paths.append(sequences[first][:depth])
        rests[first:stop] = [sequence[depth:] for sequence in sequences[first:stop]]
    of_paths, path_order = _groups(paths, columns, few_groups, -1)
    of_rests, rest_order = _groups(rests, columns, few_groups, 1)
    source_G = place_T[np.concatenate([group.ravel() for group in of_paths + of_rests])]
    target_E = np.zeros(places + 1, np.int64)
    target_E[source_G] = np.arange(len(source_G))
    return ReadOrder(
        token_E=token_E,
        place_T=place_T[:-1],
        is_empty_E=token_E == columns,
        source_G=source_G,
        target_E=target_E[:-1],
        groups=tuple((len(group), group.shape[1]) for group in of_paths + of_rests),
        paths=len(of_paths),
        state_N=np.append(np.argsort(path_order), len(paths))[path_N[rest_order]],
    )


def _choose_branches(
    length_N: np.ndarray, shared_N: np.ndarray, first: int, stop: int
) -> tuple[int, list[tuple[int, int, int]]]:
    """Choose the branches after which rules keep states, so that they read the fewest chunks.

    Args:
        length_N: Length of each sequence.
        shared_N: Number of tokens that each sequence shares with the one before.
        first: First sequence of a subtree.
        stop: End of its sequences.

    Returns:
        The number of saved chunks. For each branch, the tokens before it, and the first and last sequence after it.
    """
    inner_N = shared_N[first + 1 : stop]
    if not len(inner_N):
        return 0, []
    depth, whole_N = int(inner_N.min()), length_N[first:stop]
    starts = [first, *(np.flatnonzero(inner_N == depth) + first + 1).tolist(), stop]
    below = [_choose_branches(length_N, shared_N, *part) for part in pairwise(starts)]
    saved_below = sum(saved for saved, _ in below)
    saved = int((_chunks(whole_N) - _chunks(whole_N - depth)).sum() - _chunks(depth))
    if saved > saved_below:
        return saved, [(depth, first, stop)]
    return saved_below, [branch for _, branches in below for branch in branches]


def _groups(rows: list[np.ndarray], padding: int, few_groups: bool, side: int) -> tuple[list[np.ndarray], list[int]]:
    """Pad rows to the right, or to the left (-1). Return the rows of each group, and their order."""
    groups = dict[int, list[int]]()
    for number, row in enumerate(rows):
        groups.setdefault(0 if few_groups else _chunks(len(row)), []).append(number)
    padded = list[np.ndarray]()
    for numbers in groups.values():
        padded.append(np.full((len(numbers), max(len(rows[number]) for number in numbers)), padding))
        for row, number in zip(padded[-1][:, ::side], numbers, strict=True):
            row[: len(rows[number])] = rows[number][::side]
    return padded, sum(groups.values(), [])


def _chunks(tokens: Any) -> Any:
    return -(-tokens // CHUNK)
