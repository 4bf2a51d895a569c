"""The survey LLM Inference Unveiled (arXiv 2402.16363): its accounting, its Table 1 and its figures, reproduced."""
