"""Pairs of token ids that hypothesis draws for `decoders`: any two, with a shared start, equal, or of one token."""

from decoders import VOCAB
from hypothesis import strategies as st

ids = st.integers(1, VOCAB - 1)
dialogue = st.lists(st.integers(1, 3), min_size=1, max_size=12)
prompt, tail = st.lists(ids, min_size=1, max_size=10), st.lists(ids, max_size=6)
pair = st.one_of(
    st.tuples(dialogue, dialogue),
    st.builds(lambda prompt, one, other: (prompt + one, prompt + other), prompt, tail, tail),
    dialogue.map(lambda ids: (ids, ids)),
    st.tuples(ids, ids).map(lambda both: ([both[0]], [both[1]])),
)
