"""What the tests of this folder share."""

import pytest
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@pytest.fixture(autouse=True)
def no_layouts_of_other_meshes():
    """DTensor remembers layouts by mesh equality, with mesh objects of tests before."""
    _clear_sharding_prop_cache()
