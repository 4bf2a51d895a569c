"""Training of speculators: `data` (texts and the target's hidden states), `objective` (losses), `recipe` (one per
kind), `loop` (the trainer).
"""
