"""What a model is: its configuration, and the readers of published configurations."""
