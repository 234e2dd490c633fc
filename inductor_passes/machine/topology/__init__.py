"""A machine as data: rates of a device and of links, from a file, checked; measured figures where it has them."""
