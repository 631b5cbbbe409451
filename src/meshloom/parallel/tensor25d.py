"""Tensor parallelism in two and a half dimensions: `depth` layers of the mesh of `tensor2d`.  Source: Wang et al. 2021, arXiv 2105.14500.

Every layer of the mesh holds the same weights and works on other rows of the batch. The gradient of a weight is reduce-scattered over rows in
every micro-batch, and the shards that this leaves are all-reduced over depth once a step: the order that moves least.
"""

from meshloom.core.layout import Layout
from meshloom.parallel import tensor2d
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, merge, root
from meshloom.parallel.tensor1d import loss


def layout(depth: int, rows: int, cols: int) -> Layout:
    """As `tensor2d`, with the batch over mesh axis `depth` too."""
    return Layout({"depth": depth}, acts={"batch": ("depth",)}) | tensor2d.layout(rows, cols)


def sizes(n: int) -> tuple[int, int, int]:
    """A number of devices as a cube.  Raises ValueError for one that is not."""
    if not (side := root(n, 3)):
        raise ValueError(f"tensor25d={n} is not a cube of devices. Write depth x rows x columns, such as tensor25d=2x2x2 or 4x2x2.")
    return side, side, side


def check(c, seq: int, asked: Asked) -> None:
    """Refuses what `tensor2d` refuses, a depth of one, and rows or columns of one, by its own name."""
    depth, rows, cols = asked.sizes
    if depth == 1:
        raise ValueError(f"tensor25d=1x{rows}x{cols} has one layer of devices. Write tensor2d={rows}x{cols}.")
    if 1 in (rows, cols):
        other = f"tensor={cols}" if rows == 1 else f"zero3={rows}"
        raise ValueError(
            f"tensor25d={depth}x{rows}x{cols} splits matrices one way only. Write 'data={depth} {other}', or give it at least 2 rows and 2 columns."
        )
    tensor2d.check(c, seq, asked._replace(sizes=(rows, cols)))


def cost(x: Shapes) -> tuple[Collective, ...]:
    """As `tensor2d`, of the rows of one depth; the gradients' shards once a step over depth."""
    cols = ("cols",)
    return merge([*tensor2d.activations(x), *tensor2d.norms(x, cols), *loss(x, "cols"), *tensor2d.moved_once(x, ("depth", "rows", "cols"))])


TENSOR25D = Strategy("tensor25d", layout, check, cost, "as tensor2d, with the batch over several such meshes", sizes, 3, tensor2d.OPTIONS)
