"""What all tests share: a property test tries the same examples in every run, however long one takes.

Folders say what a test needs: `unit` nothing but the package, `train` training in plain torch, `xla` one XLA device,
`xla8` eight of them, `tpu` the TPU's own compiler. `support` has what tests use, and the scripts that they start in
processes of their own.
"""

from hypothesis import settings

settings.register_profile("same", derandomize=True, database=None, deadline=None, max_examples=100)
settings.register_profile("search", deadline=None, max_examples=1000)  # others in every run: `make test-long`
settings.load_profile("same")
