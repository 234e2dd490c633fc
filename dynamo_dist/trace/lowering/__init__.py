"""c10d calls as functional collectives: what a compiled program launches and where it waits."""
