"""What eager's cache of sharding decisions takes for one call."""
