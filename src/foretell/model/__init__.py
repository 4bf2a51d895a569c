"""Language models: configuration, loading, decoder, key-value cache, CPU kernels, and the runner of forward passes."""
