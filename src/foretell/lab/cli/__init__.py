"""The commands of the laboratory, one file each; `lab/commands.py` lists them."""
