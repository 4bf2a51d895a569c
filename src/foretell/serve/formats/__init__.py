"""Wire formats of answers, one file per API."""
