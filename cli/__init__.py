"""The program: one file per command. Knows Typer, rich, exit codes and rows; knows nothing of tensors."""
