"""Commands of ``python -m dynamo_dist``: each a module with add_arguments(parser) and
run(arguments).
"""
