"""Commands of ``python -m inductor_passes``: each a module with add_arguments(parser) and run(arguments)."""
