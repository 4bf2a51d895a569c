"""Tool calls: how models write them, how they are parsed, and grammars that enforce them."""
