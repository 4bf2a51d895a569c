"""The training loop: settings, job, trainer, checkpoints, measurements, curve and model card."""
