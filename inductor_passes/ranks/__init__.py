"""One order of launches for all ranks of a job, whatever each of them holds, compiles and
breaks.
"""
