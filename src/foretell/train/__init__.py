"""Training of speculators: `data` (data sets, batches, hidden states), `objective` (losses), `recipe` (one per kind of
speculator), `loop` (the trainer).
"""
