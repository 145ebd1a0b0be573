"""Constants that the command line shows in its help texts. This module does not import torch."""

METRICS = ("l2", "ip", "cosine")
ROUNDS = 120  # default number of rounds of `RecurrentQuantizer.fit`
