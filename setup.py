"""Everything is in setup.cfg; this makes editable installs work with older tools."""

from setuptools import setup

setup()
