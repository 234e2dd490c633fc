"""Programs that mean something on every rank, run by ``gloo_worker``: ``program(x, rank, groups)``.

``x`` differs from rank to rank; each program returns what it computed, and may change ``x``.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnf

SIZE = 4
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


@program
def all_reduce_ops(x, rank, groups):
    y, z, w = x.abs() + 1, x.clone(), x.clone()
    dist.all_reduce(x)
    dist.all_reduce(y, op=dist.ReduceOp.PRODUCT)
    dist.all_reduce(z, op=dist.ReduceOp.MAX, group=groups["half"])
    dist.all_reduce(w, dist.ReduceOp.MIN)
    return x, y, z, w


@program
def all_reduce_bits(x, rank, groups):
    bits = [torch.tensor([rank + 1, 6]) for _ in range(3)]
    dist.all_reduce(bits[0], op=dist.ReduceOp.BAND)
    dist.all_reduce(bits[1], op=dist.ReduceOp.BOR)
    dist.all_reduce(bits[2], op=dist.ReduceOp.BXOR)
    return bits


@program
def async_overlap(x, rank, groups):
    work = dist.all_reduce(x, async_op=True)
    other = torch.ones(8, 8) @ torch.ones(8, 8)
    work.wait()
    return x + other


@program
def async_chunks_of_one_buffer(x, rank, groups):
    for work in [dist.all_reduce(chunk, async_op=True) for chunk in x.chunk(4)]:
        work.wait()
    return x * 2


@program
def all_gather_forms(x, rank, groups):
    cat = torch.zeros(8 * SIZE, 8)  # gloo itself refuses the stacked form
    pieces = [torch.zeros(8, 8) for _ in range(SIZE)]
    whole = torch.zeros(8 * SIZE, 8)
    dist.all_gather_into_tensor(cat, x)
    dist.all_gather(pieces, x)
    dist.all_gather(list(whole.chunk(SIZE)), x, async_op=True).wait()
    return cat, pieces, whole


@program
def gather_in_half(x, rank, groups):
    pieces = [torch.zeros(8, 8) for _ in range(2)]
    dist.all_gather(pieces, x, group=groups["half"])
    return pieces


@program
def reduce_scatter_forms(x, rank, groups):
    one, two = torch.zeros(2, 8), torch.zeros(2, 8)
    dist.reduce_scatter_tensor(one, x)
    dist.reduce_scatter(two, list(x.chunk(SIZE)))
    return one, two


@program
def all_to_all_uneven(x, rank, groups):
    # Rank r sends r + 1 rows to rank 0 and one row to each other.
    sent = [rank + 1, 1, 1, 1]
    received = [1, 2, 3, 4] if rank == 0 else [1] * SIZE
    out = torch.zeros(sum(received), 8)
    dist.all_to_all_single(out, x[: sum(sent)], received, sent)
    return out


@program
def all_to_all_as_the_data_says(x, rank, groups):
    """Rows go to the rank that they choose, and come back: nothing but the data knows how many."""
    chosen = (x[:, 0] > 0).long() + rank % 2
    order = chosen.argsort(stable=True)
    counts = torch.histc(chosen.float(), bins=SIZE, min=0, max=SIZE - 1).long()
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts)
    here, there = counts.tolist(), coming.tolist()
    taken, back = x.new_empty(sum(there), 8), torch.empty_like(x)
    dist.all_to_all_single(taken, x[order], there, here)
    dist.all_to_all_single(back, taken * (rank + 1), here, there)
    return back


@program
def all_to_all_lists(x, rank, groups):
    inputs = [x[:1] * (peer + 1) for peer in range(SIZE)]
    outputs = [torch.zeros(1, 8) for _ in range(SIZE)]
    dist.all_to_all(outputs, inputs, async_op=True).wait()
    return outputs


@program
def rooted(x, rank, groups):
    y, z = x.clone(), x.clone()
    dist.broadcast(x, src=2)
    dist.broadcast(z, group=groups["half"], group_src=1)
    dist.reduce(y, dst=3)
    return x, z, y if rank == 3 else None


@program
def gather_and_scatter(x, rank, groups):
    pieces = [torch.zeros(8, 8) for _ in range(SIZE)] if rank == 1 else None
    dist.gather(x, pieces, dst=1)
    part = torch.zeros(2, 8)
    dist.scatter(part, list(x.chunk(SIZE)) if rank == 2 else None, src=2)
    return pieces, part


@program
def groups_of_others(x, rank, groups):
    # One of the two groups is not this rank's: nothing happens there.
    results = [dist.all_reduce(x, group=groups[name]) for name in ("first", "second")]
    return x, results


@program
def send_and_recv(x, rank, groups):
    if rank % 2 == 0:
        dist.send(x, rank + 1)
        dist.recv(x, rank + 1)
    else:
        got = torch.zeros(8, 8)
        dist.recv(got, rank - 1)
        dist.send(got * 2, rank - 1)
    return x


@program
def ring(x, rank, groups):
    got = torch.empty_like(x)
    works = [dist.isend(x, (rank + 1) % SIZE), dist.irecv(got, (rank - 1) % SIZE)]
    for work in works:
        work.wait()
    return got


@program
def ring_of_batches(x, rank, groups):
    total, block = torch.zeros_like(x), x.clone()
    for _ in range(SIZE):
        got = torch.empty_like(block)
        ops = [
            dist.P2POp(dist.isend, block, (rank + 1) % SIZE),
            dist.P2POp(dist.irecv, got, (rank - 1) % SIZE),
        ]
        works = dist.batch_isend_irecv(ops)
        total = total + block @ block
        for work in works:
            work.wait()
        block = got
    return total


@program
def two_equal_receives(x, rank, groups):
    if rank == 0:
        for factor in (1, 2):
            dist.send(x * factor, 1)
    if rank == 1:
        one, two = torch.zeros(8, 8), torch.zeros(8, 8)
        dist.recv(one, 0)
        dist.recv(two, 0)
        return one, two
    return x


@program
def equal_all_reduces(x, rank, groups):
    one, two = x.clone(), x.clone()
    dist.all_reduce(one)
    dist.all_reduce(two)
    return one + two, one


@program
def coalesced(x, rank, groups):
    y = x * 2
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    dist.all_reduce_coalesced([x, y])
    return x, y


@program
def barriers(x, rank, groups):
    dist.barrier()
    y = x + 1
    dist.barrier(group=groups["half"], async_op=True).wait()
    dist.monitored_barrier()
    return y


@program
def complex_numbers(x, rank, groups):
    c = torch.complex(x, x + 1)
    d = c.clone()
    dist.all_reduce(c)
    dist.broadcast(d, src=1)
    return c, d


@program
def work_leaves(x, rank, groups):
    y = x * 2
    return y, dist.all_reduce(y, async_op=True)


@program
def nn_functional_gradients(x, rank, groups):
    return dnf.all_reduce(x.sin()) * (rank + 1), torch.cat(dnf.all_gather(x.cos())) * x.sum()


@program
def nn_functional_rooted(x, rank, groups):
    return dnf.broadcast(x.sin(), 1), torch.stack(
        dnf.all_to_all([torch.zeros(2, 8) for _ in range(SIZE)], list(x.cos().chunk(SIZE)))
    )


@program
def nn_functional_of_two_ranks(x, rank, groups):
    # Eager's all_to_all takes ranks of the group for global ones, so that only the first ranks can.
    summed = dnf.all_reduce(x.cos(), group=groups["half"])
    if rank >= 2:
        return summed
    two = groups["first"]
    exchanged = dnf.all_to_all(
        [torch.zeros(4, 8) for _ in range(2)], list(x.cos().chunk(2)), group=two
    )
    return (
        summed,
        torch.stack(dnf.all_gather(x.sin(), group=two)) * (rank + 1),
        torch.stack(exchanged) * (rank + 1),
        dnf.broadcast(x.exp(), 0, group=two) * (rank + 2),
    )


@program
def nn_functional_gather_and_scatter(x, rank, groups):
    pieces = dnf.gather(x.sin(), dst=1)
    part = dnf.scatter(list((x.cos() * 2).chunk(SIZE)), src=2)
    summed = dnf.reduce(x.exp(), dst=3)
    return (*[piece * (rank + 1) for piece in pieces], part, summed * (rank == 3))


@program
def nn_functional_reduce_scatter(x, rank, groups):
    rows = dnf.reduce_scatter(torch.zeros(2, 8), list(x.sin().chunk(SIZE)))
    sent = [rank + 1, 1, 1, 1]
    received = [1, 2, 3, 4] if rank == 0 else [1] * SIZE
    out = torch.zeros(sum(received), 8)
    return rows * (rank + 1), dnf.all_to_all_single(out, x.cos()[: sum(sent)], received, sent)
