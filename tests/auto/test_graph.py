"""Strategies of an operation, and what follows an operand."""

import jax
import jax.numpy as jnp

from auto.cases import f32, rates
from meshloom.auto.choices import WHOLE, letters
from meshloom.auto.graph import Node, follow, strategies
from meshloom.auto.price import Move


def rule(fn, *shapes):
    return letters(jax.make_jaxpr(fn)(*shapes).jaxpr.eqns[-1])[0]


def test_strategies_of_a_product_on_one_axis() -> None:
    found = strategies(rule(jnp.dot, f32(8, 16), f32(16, 32)), [1024], [(8, 32)], rates(x=4))
    table = {(s.wants, s.gives): s for s in found}
    assert {k[1]: v.shared for k, v in table.items() if k[0] == ((WHOLE,), (WHOLE,))} == {((WHOLE,),): 1}
    assert table[((0,), (WHOLE,)), ((0,),)].moves == ()  # rows
    assert table[((WHOLE,), (1,)), ((1,),)].moves == ()  # columns
    assert table[((1,), (0,)), ((WHOLE,),)].moves == (Move("all-reduce", (0,), 1024),)
    assert table[((1,), (0,)), ((1,),)].moves == (Move("reduce-scatter", (0,), 1024),)
    assert len(found) == 6 and all(s.shared == 4 for k, s in table.items() if k[0] != ((WHOLE,), (WHOLE,)))


def test_strategies_of_a_product_on_two_axes() -> None:
    found = strategies(rule(jnp.dot, f32(8, 16), f32(16, 32)), [1024], [(8, 32)], rates(x=2, y=4))
    table = {(s.wants, s.gives): s for s in found}
    both = table[((0, 1), (WHOLE, 0)), ((0, WHOLE),)]
    assert both.shared == 8 and both.moves == (Move("all-reduce", (1,), 512),)
    assert table[((1, 1), (0, 0)), ((WHOLE, WHOLE),)].moves == (Move("all-reduce", (0, 1), 1024),)
    assert table[((1, 1), (0, 0)), ((0, WHOLE),)].moves == (Move("reduce-scatter", (0,), 1024), Move("all-reduce", (1,), 512))
    assert len(table) == len(found)
    # a sum is not scattered to where a mesh axis inside it already splits
    assert not any(s.wants == ((1, 0), (0, WHOLE)) and s.gives == ((0, 0),) for s in found)


def test_what_does_not_divide_is_no_strategy() -> None:
    found = strategies(rule(jnp.dot, f32(6, 16), f32(16, 7)), [168], [(6, 7)], rates(x=4))
    assert {(s.wants, s.gives) for s in found} == {(((WHOLE,), (WHOLE,)), ((WHOLE,),)), (((1,), (0,)), ((WHOLE,),))}


def test_followers_keep_what_they_can() -> None:
    mesh = (2, 4)
    softmax = rule(lambda x: jnp.max(x, 1), f32(8, 16))
    assert follow(softmax, 0, (0, 1), 512, [32], mesh).gives == ((0, WHOLE),)
    assert follow(softmax, 0, (0, 1), 512, [32], mesh).moves == (Move("all-reduce", (1,), 16),)
    sort = rule(lambda x: jax.lax.cumsum(x, 1), f32(8, 16))
    done = follow(sort, 0, (0, 1), 512, [512], mesh)
    assert done.gives == ((0, WHOLE),) and done.moves == (Move("all-gather", (1,), 256),)
    heads = rule(lambda x: x.reshape(8, 2, 8), f32(8, 16))
    assert follow(heads, 0, (0, 1), 512, [512], mesh) == ((((0, WHOLE),)), ((0, WHOLE),), (Move("all-gather", (1,), 256),))
    add = rule(lambda x, y: x + y, f32(8, 16), f32(8, 16))
    assert follow(add, 0, (0, 1), 512, [512], mesh).wants == ((0, 1), (0, 1))


def test_a_node_counts_its_runs() -> None:
    node = Node("", "", [0.0, 0.0], [(), ()], [(), ()], {}, 3.0, 0)
    node.add(1, 2.0, (Move("all-gather", (0,), 1),))
    assert node.seconds == [0.0, 6.0] and node.moves == [(), (Move("all-gather", (0,), 1),)]
