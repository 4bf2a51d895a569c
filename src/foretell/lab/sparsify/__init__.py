"""Makes a model's feed-forward networks sparse: thresholds, predictors of neurons, nested networks, placement."""
