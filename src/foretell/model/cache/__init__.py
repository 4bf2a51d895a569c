"""What layers keep of tokens: keys and values in blocks, recurrent states, and the layout of a pass."""
