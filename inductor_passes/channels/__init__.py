"""Second channels over the peers of a group: made by the user, used by the scheduler."""
