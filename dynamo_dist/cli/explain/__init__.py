"""``python -m dynamo_dist explain SCRIPT``: run a script as it is, and report what its compiles did."""
