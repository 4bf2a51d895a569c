"""The laboratory: what compresses, compares and reproduces models and papers. The engine does not import it."""
