"""Every table of torch that enable() touches, as comparable data; run in a process of its own
too.
"""


def snapshot():
    """Identities and contents, so that an equal but other object shows up as a difference."""
    import torch
    import torch.compiler.config as compiler_config
    from torch._dynamo import guards
    from torch._dynamo.backends import registry
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch._inductor import codecache
    from torch._inductor.cpu_vec_isa import VecISA
    from torch._inductor.output_code import CompiledFxGraph
    from torch._library import opaque_object
    from torch.distributed import device_mesh, distributed_c10d
    from torch.distributed.tensor import DTensor, placement_types
    from torch.distributed.tensor._decompositions import DecompShardingStrategy
    from torch.distributed.tensor._dispatch import OpDispatcher
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def identities(table):
        return [(key, id(value)) for key, value in table.items()]

    def contents(table):
        # Strategies are taken out and put back, which keeps no order.
        return sorted((str(key), id(value)) for key, value in table.items())

    dispatcher = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    sharding = (OpDispatcher, ShardingPropagator, DecompShardingStrategy)
    classes = {
        *sharding,
        torch._TorchCompileInductorWrapper,
        guards.GuardBuilder,
        CompiledFxGraph,
        codecache.FxGraphCachePickler,
        VecISA,
        DTensor,
        PyCodegen,
        VariableBuilder,
        SourcelessBuilder,
        *descendants(VariableTracker),
    }
    entry = compiler_config._config["cache_key_tag"]
    override = entry.user_override
    return {
        **{f"{c.__module__}.{c.__qualname__}": identities(vars(c)) for c in classes},
        **{
            f"type dispatch {flag}": identities(VariableBuilder._type_dispatch_impl(flag))
            for flag in (True, False)
        },
        "id dispatch": identities(VariableBuilder._id_dispatch()),
        "sourceless": identities(SourcelessBuilder._type_handlers),
        "handlers": identities(TorchInGraphFunctionVariable._get_handlers()),
        "guard dispatch": identities(getattr(guards, "GUARD_VALUE_DISPATCH", {})),
        "opaque": {
            cls.__qualname__: (dict(info.members), id(info.guard_fn), info.opaque_typ)
            for cls, info in opaque_object._OPAQUE_TYPES.items()
        },
        "op handlers": contents(dispatcher._custom_op_handlers),
        **{
            name: contents(getattr(propagator, name))
            for name in (
                "op_strategy_funcs",
                "op_single_dim_strategy_funcs",
                "op_to_schema_info",
                "op_to_schema_info_for_single_dim_strategy",
            )
        },
        "backends": dict(registry._BACKENDS),
        "compiler functions": identities(registry._COMPILER_FNS),
        "cache key tag": (
            entry.default,
            entry.env_value_default,
            override.get() if hasattr(override, "get") else override,
        ),
        **{
            module.__name__: identities(vars(module))
            for module in (device_mesh, distributed_c10d, placement_types, guards, codecache)
        },
    }


def descendants(cls):
    found = set()
    for child in cls.__subclasses__():
        if not child.__module__.startswith("dynamo_dist"):
            found |= {child, *descendants(child)}
    return found


def difference(before, after):
    """Names of the tables that differ."""
    return [name for name in before | after if before.get(name) != after.get(name)]


def settle():
    """Fill torch's own lazy tables, which any first compile fills."""
    from torch._dynamo.backends.registry import list_backends
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    list_backends()
    TorchInGraphFunctionVariable._get_handlers()
