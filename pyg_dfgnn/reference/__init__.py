"""Plain torch versions of every op for any dtype and device, and what tests and bench judge results by.

- :mod:`~pyg_dfgnn.reference.zoo`: the graphs, ``EdgeList`` and ``ZOO[name](full)``.
- :mod:`~pyg_dfgnn.reference.oracle`: ``float64_reference`` and ``compare``.
- :mod:`~pyg_dfgnn.reference.tolerances`: ``tolerance(dtype, direction, op)`` and ``assert_all_close``.
"""
