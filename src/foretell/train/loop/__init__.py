"""The training loop and what it needs: settings, checkpoints, measurements, the curve and the model card."""
