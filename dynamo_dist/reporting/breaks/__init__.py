"""Graph breaks: Dynamo's message taken apart, the user's line, the cause, and what to write instead."""
