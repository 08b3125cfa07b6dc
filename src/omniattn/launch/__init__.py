"""One module per kernel family: grid, packed arguments, launch."""
