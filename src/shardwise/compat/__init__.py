"""Names and signatures of other libraries over this engine: a script needs another import only."""
