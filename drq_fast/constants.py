"""Constants that the command line shows in its help texts. This module does not import torch."""

METRICS = ("l2", "ip", "cosine")
VECTORS = ("float32", "float16", "int8")  # how an index can keep vectors beside codes
ROUNDS = 120  # default number of rounds of `RecurrentQuantizer.fit`
ROUNDS_APART = 80  # with several codebooks, where a round takes longer
ROUNDS_LARGE = 16  # above 8192 codewords, where a round takes several times as long
