"""What an operation is, stated as data: records that dispatch, ops, reference, nn and bench read."""
