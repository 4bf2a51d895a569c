"""Text to retrieve from: corpora, suffix arrays, and datastores on disk."""
