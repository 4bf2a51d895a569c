"""Text that is copied phrase by phrase from an index (Lan et al., "Copy is All You Need", arXiv 2307.06962)."""
