"""Statements of operations as data: records that dispatch, ops, reference, nn and bench read."""
