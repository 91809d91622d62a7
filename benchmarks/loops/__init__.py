"""Training steps of real loops as data, and what measures them: small graphs, batches, samples, recurrent cells."""
