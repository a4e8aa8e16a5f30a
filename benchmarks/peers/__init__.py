"""Other ways to train the same, each written the way its users write it.

Each module has `train(bench)`: a whole training loop that calls `bench.step()` after every optimizer step and ends once
that returns True.
"""
