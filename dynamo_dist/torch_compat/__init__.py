"""Private names of torch, and nothing else: where they are, in which version, how they are changed
and restored.

By torch's own subsystems: ``dynamo``, ``aot`` (AOTAutograd), ``dtensor``, ``c10d``, ``inductor``.
What stands here knows how to look into torch and how to change it, not when or why. A name that a
torch lacks is None here, and what differs from version to version is made one shape.
"""
