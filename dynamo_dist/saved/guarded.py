"""Guards by content: what each asks of the value at its source, in a form that another process can hold its own value against.

A guard that is built anew asks that a value is what it is now. So before it is built for another process' value, that value must have the
content that the traced one had. Kinds that are not listed have no form: their frames are traced.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from dynamo_dist.saved.contents import Content, Contents, NotByContent, code_digest
from dynamo_dist.torch_compat.dynamo import modules, opaque
from dynamo_dist.torch_compat.dynamo.frame_values import Values
from dynamo_dist.torch_compat.dynamo.kept_frames import KeptGuard
from dynamo_dist.torch_compat.dynamo.reached import Reached

# Of torch's state as a whole, which is compared as a whole.
_OF_STATE = frozenset(
    "GRAD_MODE DETERMINISTIC_ALGORITHMS GLOBAL_STATE TORCH_FUNCTION_STATE DEFAULT_DEVICE AUTOGRAD_SAVED_TENSORS_HOOKS "
    "FSDP_TRAINING_STATE DUAL_LEVEL FUNCTORCH_STACK_MATCH".split()
)


def contents_of(guards: Iterable[KeptGuard], values: Values) -> Iterator[tuple[str, Content]]:
    """Content of each guard, beside the guard in words. Raises NotByContent, naming it, for one that has none."""
    contents = Contents()
    for guard in guards:
        if guard.kind in _OF_STATE:
            continue
        label = f"{guard.kind} on {guard.source.name}"
        form = _FORMS.get(guard.kind)
        if form is None:
            raise NotByContent(label)
        try:
            yield label, form(contents, values[guard.source], guard, values)
        except NotByContent as error:
            raise NotByContent(f"{label}: {error}") from None
        except LookupError:
            raise NotByContent(f"{label}: there is no such value") from None


def contents_of_reached(
    reached: Mapping[str, Reached], values: Values
) -> Iterator[tuple[str, Content]]:
    """What a frame has read of objects that no variable holds, beside where it is. Raises NotByContent."""
    contents = Contents()
    for each in reached.values():
        if each.read is not None:
            origin = values[each.source]
            read = each.read(each.find(origin), origin)
            yield f"what stands behind {each.source.name}", contents.of(read)


def _kind(contents: Contents, value: Any, *_: Any) -> Content:
    return contents.kind(type(value))


def _identity(contents: Contents, value: Any, *_: Any) -> Content:
    return contents.identity(value)


def _code(contents: Contents, value: Any, *_: Any) -> Content:
    if type(value) is types.FunctionType:
        return code_digest(value.__code__)
    return contents.identity(value)


def _value(contents: Contents, value: Any, *_: Any) -> Content:
    return contents.of(value)


def _length(contents: Contents, value: Any, guard: KeptGuard, _: Values) -> Content:
    """A module's hooks stand in dictionaries by numbers that a process counts; found by their place, they are guarded by what they do."""
    found = (contents.kind(type(value)), len(value))
    if not isinstance(value, Mapping) or guard.source.name.endswith(_HOOKS):
        return found
    return (*found, *map(contents.of, value))


def _keys(contents: Contents, value: Any, *_: Any) -> Content:
    return (contents.kind(type(value)), *map(contents.of, value.keys()))


def _contains(contents: Contents, value: Any, guard: KeptGuard, _: Values) -> Content:
    key = _argument(guard, "key")
    return (contents.of(key), key in value)


def _absent(contents: Contents, value: Any, guard: KeptGuard, _: Values) -> Content:
    name = _argument(guard, "attr")
    return (name, name in vars(value))


def _attribute(contents: Contents, value: Any, guard: KeptGuard, _: Values) -> Content:
    name = _argument(guard, "attr")
    return (name, hasattr(value, name))


def _tensor(contents: Contents, value: Any, *_: Any) -> Content:
    return contents.tensor(value)


def _metadata(contents: Contents, value: Any, *_: Any) -> Content:
    return (contents.kind(type(value)), contents.of(value.__tensor_flatten__()[1]))


def _read(contents: Contents, value: Any, guard: KeptGuard, _: Values) -> Content:
    """What one of our trackers has read of a group, a mesh or a placement."""
    asked = dict(guard.keywords)
    return (asked["what"], contents.of(asked["read"](opaque.unwrap(value))))


def _same(contents: Contents, value: Any, guard: KeptGuard, values: Values) -> Content:
    return value is values[_argument(guard, "source_b")]


def _alive(contents: Contents, value: Any, *_: Any) -> Content:
    return value is not None


def _object(contents: Contents, value: Any, *_: Any) -> Content:
    """A module counts by its class and by the state that a parallel style keeps for it: all else that was read of it is guarded."""
    if isinstance(value, nn.Module):
        return (contents.kind(type(value)), contents.kind(type(modules.module_state(value))))
    return contents.of(value)


def _argument(guard: KeptGuard, name: str) -> Any:
    """The one argument that a guard has beside its source."""
    [found] = [*guard.args, *dict(guard.keywords).values()]
    return found


_HOOKS = tuple(f".{name}" for name in vars(nn.Module()) if "_hooks" in name)
_Form = Callable[[Contents, Any, KeptGuard, Values], Content]
_FORMS: dict[str, _Form] = {
    "TYPE_MATCH": _kind,
    "FAKE_SCRIPT_TYPE_MATCH": _kind,
    **dict.fromkeys(
        ("ID_MATCH", "CLASS_MATCH", "MODULE_MATCH", "FUNCTION_MATCH", "BUILTIN_MATCH"), _identity
    ),
    "CLOSURE_MATCH": _code,
    **dict.fromkeys(("CONSTANT_MATCH", "EQUALS_MATCH", "NONE_MATCH", "BOOL_MATCH"), _value),
    "DTENSOR_SPEC_MATCH": _value,
    "OPAQUE_OBJ_GUARD_FN_MATCH": _value,
    "SEQUENCE_LENGTH": _length,
    "EMPTY_NN_MODULE_HOOKS_DICT": _length,
    "DICT_KEYS_MATCH": _keys,
    "MAPPING_KEYS_CHECK": _keys,
    **dict.fromkeys(
        ("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"), _contains
    ),
    "NOT_PRESENT_IN_GENERIC_DICT": _absent,
    "HASATTR": _attribute,
    "TENSOR_MATCH": _tensor,
    "TENSOR_SUBCLASS_METADATA_MATCH": _metadata,
    "DUPLICATE_INPUT": _same,
    "VALUE_MATCH": _read,
    "IDENTITY_MATCH": _object,
    "WEAKREF_ALIVE": _alive,
}
