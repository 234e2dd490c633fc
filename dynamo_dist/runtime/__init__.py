"""Code that runs around a compiled graph on every call: guards, and wrapping of what it returns."""
