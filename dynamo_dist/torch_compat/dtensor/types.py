"""DTensor's own types of layouts, calls and strategies."""

from __future__ import annotations

from torch._ops import OpOverload as OpOverload
from torch.distributed._local_tensor import LocalTensor as LocalTensor
from torch.distributed._local_tensor import LocalTensorMode as LocalTensorMode
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor._op_schema import OpSchema as OpSchema
from torch.distributed.tensor._op_schema import OpSpec as OpSpec
from torch.distributed.tensor._op_schema import OpStrategy as OpStrategy
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo as RuntimeSchemaInfo
from torch.distributed.tensor._op_schema import TupleStrategy as TupleStrategy
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode as GuardOnDataDependentSymNode,
)
