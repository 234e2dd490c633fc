"""The passes at work in a compile: Inductor's hooks, one owner of the order, the order in
generated code.
"""
