"""A step of a model with some of its layers alone, which the parts of a pattern of remat are counted by; and the places that no part comes to."""

from dataclasses import replace

from meshloom.core.remat import words_of
from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import map_named
from meshloom.parallel.base import Shapes, in_stack


def by_remat(x: Shapes) -> dict[str, Shapes]:
    """What each part of a pattern of remat is of: word (core/remat.py) -> the same step with no other layers than those. The same step where one word
    is for all."""
    words = words_of(x.remat, x.layers // x.parts) * x.parts
    found = dict.fromkeys(words)
    if len(found) == 1:
        return {word: x._replace(remat=word) for word in found}
    return {word: restricted(x, tuple(w == word for w in words))._replace(remat=word) for word in found}


def restricted(x: Shapes, keep: tuple[bool, ...]) -> Shapes:
    """The same step with nothing but some of its layers, as many in each part.  keep: of each in `run`, whether it stays."""
    run = tuple(kind for kind, stays in zip(x.run, keep, strict=True) if stays)
    straight = tuple(seen for seen, stays in zip(x.straight, keep) if stays)

    def one(path: str, s: Spec) -> Spec | None:
        if s.axes[0] != "layer":
            return s
        layers = sum(in_stack(path, kind.stack) for kind in run)
        return replace(s, shape=(layers, *s.shape[1:]), used=(layers, *s.used[1:])) if layers else None

    flow = x.flow and x.flow._replace(heavy=())
    return x._replace(specs=map_named(one, x.specs, is_leaf=is_spec), run=run, straight=straight, flow=flow)


def unreached(x: Shapes) -> frozenset[str]:
    """Places that a step does not come to: its backward pass ends where nothing trains any more. A loop over layers goes through all of them or none;
    of unrolled ones, a compiler also leaves out what the first layers compute for an embedding that is frozen, if they are frozen too. The head's backward
    pass is counted in full, also where its weight alone trains."""
    trained = {path: s for path, s in x.leaves.items() if not s.frozen and s.role != "settled"}
    if any({"vocab", "position"} & set(s.axes) and path != "head" for path, s in trained.items()):
        return frozenset()
    if any(s.axes[0] == "layer" for s in trained.values()):
        return frozenset({"embed back"})
    return frozenset({"embed back", "gradients", "layer back", "layer again", "weights again"})
