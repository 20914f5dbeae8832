"""One module per op: the shapes users have, and the peers they would pick instead of us."""
