"""Plan a training before renting a TPU: does it fit in memory, how fast can it be, and how much does it cost?"""
